"""W&B as a view: what is logged offline can be read back, and its failure costs nothing."""

from __future__ import annotations

import json
import struct

import pytest

from specbench.measure import store
from specbench.tracking import scalars, track

NONE = {"name": "none"}
OFFLINE = {"name": "wandb", "project": "specbench", "mode": "offline", "group": None}


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "2026-01-01_000000_sps_tiny_all_00000000"
    folder.mkdir()
    block = {"questions": 2, "speedup": 1.5, "mbsu": None}
    store.write_json(folder / store.SUMMARY, {"method": "sps", "overall": block, "tasks": {"qa": block}})
    (folder / store.CONFIG).write_text("method: {name: sps}\n")
    return folder


def test_scalars_are_numbers_by_path():
    assert scalars({"a": {"b": 1, "c": None, "d": {"e": 0.5}}, "f": "text"}) == {"a/b": 1, "a/d/e": 0.5}


def test_nothing_is_written_without_a_tracker(run_dir):
    before = sorted(run_dir.iterdir())
    track(run_dir, NONE)
    assert sorted(run_dir.iterdir()) == before


def logged(log: bytes):
    """The protobuf records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    assert log[:4] == b":W&B"
    at, parts = 7, []
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block is padding
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", log[at : at + 7])
        parts.append(log[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def test_an_offline_run_holds_the_summary(run_dir):
    track(run_dir, OFFLINE)
    (log,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    values = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in logged(log.read_bytes())
        for item in record.summary.update
    }
    assert values["overall/speedup"] == 1.5 and values["tasks/qa/questions"] == 2
    assert "overall/mbsu" not in values


def test_a_failing_tracker_is_one_line(run_dir, capsys):
    track(run_dir, OFFLINE | {"mode": "no such mode"})
    error = capsys.readouterr().err
    assert "is not tracked" in error and "Traceback" not in error
