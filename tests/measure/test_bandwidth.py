import gc
import weakref

import pytest
import torch

from specbench.decoding.cpu.packed_linear import Panels
from specbench.measure.machine import bandwidth, hardware
from specbench.measure.machine.bandwidth import buffer_bytes  # as it is, whatever size all tests get
from tests.support.kernel_passes import needs_kernels


def test_bandwidth_is_a_plausible_speed(monkeypatch):
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda kind: 2**24)
    assert 1e7 < bandwidth.bandwidth(torch.device("cpu")) < 1e13


def test_without_memory_the_bandwidth_is_unknown(monkeypatch, capsys):
    faults = iter(
        [RuntimeError("can't allocate memory: you tried to allocate 9 bytes"), RuntimeError("other")]
    )
    monkeypatch.setattr(bandwidth, "bandwidth", lambda device: (_ for _ in ()).throw(next(faults)))
    assert bandwidth.bandwidth_if_possible(torch.device("cpu")) is None
    assert "warning: the memory's bandwidth was not measured" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="other"):
        bandwidth.bandwidth_if_possible(torch.device("cpu"))


def test_the_buffer_of_the_bandwidth_is_larger_than_the_caches(tmp_path, monkeypatch):
    """An EPYC 9684X: 12 caches of 96 MiB, each of 8 cores."""
    for core in range(96):
        cache = tmp_path / f"cpu{core}" / "cache" / "index3"
        cache.mkdir(parents=True)
        (cache / "size").write_text("98304K\n")
        (cache / "shared_cpu_list").write_text(f"{core // 8 * 8}-{core // 8 * 8 + 7}\n")
    assert bandwidth.last_level_cache_bytes(tmp_path) == 1152 * 2**20
    assert bandwidth.last_level_cache_bytes(tmp_path / "none") == bandwidth.UNKNOWN_CACHE_BYTES
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: 1152 * 2**20)
    monkeypatch.setattr(bandwidth, "free_memory", lambda: None)
    assert buffer_bytes("cpu") == 2304 * 2**20 and buffer_bytes("cuda") == 2**30


def test_the_buffer_and_its_copy_leave_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: 2**30)
    for free, size in ((2**34, 2**31), (2**32, 2**30), (2**30 + 999, 2**28), (0, 4 * bandwidth.COLUMNS)):
        monkeypatch.setattr(bandwidth, "free_memory", lambda free=free: free)
        assert buffer_bytes("cpu") == size


@needs_kernels
def test_the_buffer_is_given_back_before_its_copy_is_read(monkeypatch):
    made, ones, times = [], torch.ones, Panels.times

    def watched(*size, **options):
        tensor = ones(*size, **options)
        made.append(weakref.ref(tensor))
        return tensor

    def read(panels, states, bias):
        assert made[0]() is None
        return times(panels, states, bias)

    monkeypatch.setattr(torch, "ones", watched)
    monkeypatch.setattr(Panels, "times", read)
    assert bandwidth.bandwidth(torch.device("cpu")) > 0 and len(made) == 2


@pytest.mark.slow
@pytest.mark.skipif(not hardware.RESET_PEAK.exists(), reason="nothing counts the peak here")
def test_the_buffer_of_the_bandwidth_is_in_no_peak_memory(monkeypatch):
    cpu, size = torch.device("cpu"), 2**27
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda kind: size)
    gc.collect()  # what other tests have left would go in the middle
    hardware.reset_peak_memory(cpu)
    before = hardware.peak_memory(cpu)
    bandwidth.bandwidth(cpu)
    assert hardware.peak_memory(cpu) > before + size / 2
    hardware.reset_peak_memory(cpu)
    assert hardware.peak_memory(cpu) < before + size / 2
