"""S24: storage without descriptors, whose objects are there when their file was closed, and not before."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import ckpt
from ckpt.engine.copy import copy_steps
from ckpt.errors import CkptError, StoreError
from ckpt.run import Run
from ckpt.store import open_store
from tests.ranks import run_ranks
from tests.store import objects

ELEMENTS = 512 << 10  # 2 MiB of float32


def state(step: int) -> dict[str, Any]:
    """2 MiB that tell their step, in a module and beside it."""
    torch.manual_seed(step)
    return {"model": torch.nn.Linear(64, 64), "w": torch.randn(ELEMENTS), "step": step}


def assert_is(run: str, step: int) -> None:
    """Read whole and loaded in place, bit-equal."""
    expected, found, loaded = state(step), ckpt.read(run, step=step), state(0)
    ckpt.load(run, loaded, step=step)
    assert found["step"] == loaded["step"] == step
    assert torch.equal(found["w"], expected["w"])
    assert torch.equal(loaded["w"], expected["w"])
    for name, tensor in expected["model"].state_dict().items():
        assert torch.equal(loaded["model"].state_dict()[name], tensor)
    assert ckpt.verify(run, step=step).ok


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Object storage that the keeper reaches too: its files have no descriptor, and hold all until they are closed."""
    objects.reach_keepers(monkeypatch, tmp_path)
    return f"object://{tmp_path}/run"


def save(_rank: int, _world: int, run: str, steps: list[int]) -> list[str]:
    """What each save came to: its error, or nothing."""
    objects.register()
    errors = []
    for step in steps:
        try:
            ckpt.save(run, step, state(step), wait=True)
        except CkptError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


def in_a_job(run: str, steps: list[int], **faults: Any) -> list[str]:
    """The same in a job of two ranks, with a keeper whose storage misbehaves."""
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"], objects.FAULTS_ENV: json.dumps(faults)}
    errors, same = run_ranks(2, save, run, steps, env=environment)
    assert [bool(error) for error in errors] == [bool(error) for error in same]
    return errors


def test_s24_two_mib_come_back(run: str, tmp_path: Path) -> None:
    """Saved by the keeper, read through a file system of its own; then by way of this process's memory as well."""
    assert in_a_job(run, [1]) == [""]
    assert_is(run, 1)
    memory = f"memory://{tmp_path.name}"
    try:
        assert copy_steps(run, memory).ok
        assert_is(memory, 1)
    finally:
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


FAILING = {  # step -> what fails of it
    2: ("*/model-*", "close"),
    3: ("*/state-*", "write"),
    4: ("*/state-*", "late"),
    5: ("*/part-*", "close"),
    6: ("*/model.safetensors.index.json", "write"),
    7: ("*/COMMIT", "close"),
    8: ("*/COMMIT", "late"),
}


def test_s24_a_file_that_fails_makes_no_step(run: str) -> None:
    """Whichever object, and whether write or close: the save says why, no such step is there, and the next one is."""
    fail = [(f"*/step-{step:08d}-*{pattern}", when) for step, (pattern, when) in FAILING.items()]
    errors = in_a_job(run, [1, *FAILING, 9], fail=fail)
    assert (errors[0], errors[-1]) == ("", "")
    for step, error in zip(FAILING, errors[1:-1], strict=True):
        assert "boom" in error, step
        assert FAILING[step][0].strip("*/") in error, step
    assert ckpt.steps(run) == [1, 9]
    assert_is(run, 1)
    assert_is(run, 9)
    store = open_store(run)
    for attempt in Run.open(run).attempts():
        assert attempt.step in {1, 9} or store.exists(f"{attempt.folder}/COMMIT") is False


def test_s24_an_exception_while_writing_publishes_nothing(run: str) -> None:
    """Neither at once nor when the file's memory is taken back, which closes it."""
    store = open_store(run)
    with pytest.raises(ZeroDivisionError), store.open_sink("step-00000001-w1.1/model", 2 << 20) as sink:
        sink.write(bytes(1 << 20))
        raise ZeroDivisionError
    del sink
    gc.collect()
    assert store.list() == []
    with pytest.raises(StoreError), store.open_sink("step-00000001-w1.1/model", 2 << 20) as sink:
        sink.write(bytes(1 << 20))
    assert store.list() == []
