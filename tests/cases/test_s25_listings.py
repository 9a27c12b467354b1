"""S25: a listing that comes from a cache, or lags behind what is there, hides no step and revives none."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from ckpt.engine.copy import copy_steps
from ckpt.engine.retention import prune
from ckpt.errors import FencedError, NotFoundError
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, write_step
from tests.ranks import run_ranks
from tests.store import objects

LAG_S = 0.5


class CachedMemory(MemoryFileSystem):
    """Memory whose listings each instance remembers, as those of file systems over a network are."""

    protocol = "cachedmemory"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the class above has it
    pseudo_dirs = [""]  # noqa: RUF012 - and this

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("cachedmemory://"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        entries = self._ls_from_cache(path)
        if entries is None:
            entries = self.dircache[path] = super().ls(path, detail=True, **options)
        return entries if detail else [entry["name"] for entry in entries]


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("cachedmemory", CachedMemory, clobber=True)
    yield f"cachedmemory://{tmp_path.name}"
    CachedMemory.store.clear()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Object storage that the keeper reaches too."""
    objects.reach_keepers(monkeypatch, tmp_path)
    return f"object://{tmp_path}/run"


def write(run: Run, step: int, writer: int | None = None) -> None:
    """A small step."""
    write_step(run, step, [HandTensor("w", "uint8", (4,), bytes(4))], values={"step": step}, writer=writer)


def test_s25_a_cached_listing(cached: str, tmp_path: Path) -> None:
    """A has listed the root, B saves step 3: A sees it at once."""
    source = Run.open(tmp_path / "source")
    write(source, 1)
    copy_steps(source, cached)
    stale, a = fsspec.filesystem("cachedmemory", skip_instance_cache=True), Run.open(cached)
    before = stale.ls(f"/{tmp_path.name}", detail=False)
    assert a.find().attempt.step == 1
    write(source, 3)
    b = Run.open(cached)
    assert copy_steps(source, b).ok
    assert stale.ls(f"/{tmp_path.name}", detail=False) == before, "the cache is one"
    assert a.find().attempt.step == 3
    assert ckpt.latest(cached) == 3
    assert ckpt.read(cached)["step"] == 3


def save_in_turn(_rank: int, _world: int, run: str, folder: str) -> Any:
    """Steps 1 to 4, the two newest kept; what this process, and the raw listing, see right after the last."""
    objects.register()
    state: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    with ckpt.Checkpointer(run, state, every=ckpt.every(steps=1), keep=ckpt.keep(last=2)) as checkpointer:
        for step in checkpointer.steps(total=3):
            state["w"].fill_(step)
            state["step"] = step
    state["w"].fill_(4)
    state["step"] = 4
    ckpt.save(run, 4, state, wait=True)
    Path(folder, "saved").touch()
    loaded: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
    return ckpt.load(run, loaded).step, loaded


def test_s25_a_listing_that_lags(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New objects are listed half a second late, deleted ones for as long: a save returns when all find its step."""
    objects.misbehave(monkeypatch, lag_s=LAG_S)
    seen: list[Any] = []

    def look() -> None:
        deadline = time.monotonic() + 60
        while not Path(tmp_path, "saved").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(ckpt.latest(url))
        target: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
        seen.append(ckpt.load(url, target).step)

    other = threading.Thread(target=look)
    other.start()
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"], objects.FAULTS_ENV: json.dumps({"lag_s": LAG_S})}
    ((step, loaded),) = run_ranks(1, save_in_turn, url, str(tmp_path), env=environment, process_group=False)
    other.join()
    assert (step, loaded["step"]) == (4, 4)
    assert torch.equal(loaded["w"], torch.full((1000,), 4.0))
    assert seen == [4, 4]
    assert ckpt.steps(url) == [2, 3, 4]
    assert ckpt.verify(url).ok


def test_s25_what_is_deleted_is_not_revived(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention goes by keys: a deleted step that is still listed is no step, and deleting again is no error."""
    run = Run.open(url)
    for step in (1, 2, 3):
        write(run, step)
    objects.misbehave(monkeypatch, gone_s=3600)
    for _ in range(2):
        prune(run, keep_last=1, grace_s=0)
        assert len(run.store.list()) >= 3, "deleted steps are listed"
        assert ckpt.steps(url) == [3]
        assert ckpt.latest(url) == 3
    run.delete_attempt(run.attempts()[0])
    with pytest.raises(NotFoundError):
        run.find(1)


def test_s25_a_hidden_writer_fences(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer writer's record that no listing shows is found by its key; so is the next free number."""
    run = Run.open(url)
    write(run, 1)
    objects.misbehave(monkeypatch, lag_s=3600)
    other = Run.open(url)
    assert other.open_writer(job="b", world=1, resumed_from=1).number == 2
    assert run.store.list("writers") == []
    with pytest.raises(FencedError, match="writer 2 holds the run: b"):
        run.check_not_fenced(1)
    assert [writer.number for writer in Run.open(url).writers()] == [1, 2]
    assert Run.open(url).open_writer(job="c", world=1, resumed_from=1).number == 3
    with pytest.raises(FencedError, match="writer 3 holds the run: c"):
        other.check_not_fenced(2)


def test_s25_an_empty_listing_is_read_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has writers and its listing no step: one of the last half second is found all the same."""
    monkeypatch.setattr(Run, "await_listed", lambda *_: None)  # as if the writer had died at that moment
    write(Run.open(url), 1)
    objects.misbehave(monkeypatch, lag_s=3600)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            objects.misbehave(monkeypatch)

    monkeypatch.setattr(time, "sleep", sleep)
    assert Run.open(url).store.list() == []
    assert ckpt.latest(url) == 1
    assert pauses == [0.1, 0.3]
