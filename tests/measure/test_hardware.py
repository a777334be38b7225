import subprocess
from types import SimpleNamespace

import torch

from specbench.measure.machine import hardware


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H200, 570.1, 143771, 1980, 700.00'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [g["name"] for g in hardware.gpus()] == ["NVIDIA H200"]
    assert hardware.gpus()[0]["driver_version"] == "570.1"
    tool.write_text("#!/bin/sh\necho '0, 1755, 412.33, 61'\n")
    state = {"index": "0", "clocks.sm": "1755", "power.draw": "412.33", "temperature.gpu": "61"}
    assert hardware.gpus(hardware.GPU_STATE) == [state]
    # Of several GPUs the one that computes, whatever nvidia-smi calls it.
    tool.write_text(
        "#!/bin/sh\ncase \"$*\" in *--id=GPU-ab-12*) echo '3, 900, 99.0, 40';; *) exit 6;; esac\n"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-12"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    assert hardware.gpus(hardware.GPU_STATE, torch.device("cuda:1"))[0]["clocks.sm"] == "900"
    names = [hardware.processor(torch.device(name)) for name in ("cuda:1", "cpu")]
    assert names == ["GPU of cuda:1", hardware.cpu_model()]
    for broken in ("echo 'no driver' >&2\nexit 9", "echo '0, a GPU, and no more'"):
        tool.write_text(f"#!/bin/sh\n{broken}\n")
        assert hardware.gpus() == []

    def hangs(*given, **_):
        raise subprocess.TimeoutExpired(given, 60)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert hardware.gpus() == []


def test_processors_without_a_name_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware.platform, "processor", lambda: "")
    monkeypatch.setattr(hardware.platform, "machine", lambda: "aarch64")
    cpuinfo = tmp_path / "cpuinfo"
    assert hardware.cpu_model(cpuinfo) == "aarch64"
    core = "processor\t: {}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n\n"
    cpuinfo.write_text(core.format(0) + core.format(1))
    assert hardware.cpu_model(cpuinfo) == "aarch64, implementer 0x41, part 0xd0c, variant 0x3"
    cpuinfo.write_text("processor\t: 0\nflags\t\t:\nmodel name\t: AMD EPYC 9684X\ncache size\t: 1024 KB\n")
    assert hardware.cpu_model(cpuinfo) == "AMD EPYC 9684X"
