"""Every moment of a save: its keeper is stopped before each operation of its store in turn, and someone else acts."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.errors import CkptError
from ckpt.keeper.client import KeeperClient
from ckpt.run import Run
from ckpt.testing import read_log, store_env
from tests.keeper.conftest import wait_for
from tests.keeper.rank_process import stage

Moment = tuple[str, str, int]  # operation, key, and how often it came before


def moments_of_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Moment]:
    """The operations of a keeper's store while it saves step 2 of a run that has step 1, and deletes nothing."""
    log = folder / "log"
    save(folder / "counted", monkeypatch, {"wrap": "recording", "log": log})
    names = [(entry.op, entry.key) for entry in read_log(log)]
    first = next(i for i, (_, key) in enumerate(names) if key.startswith("step-00000002"))
    seen: Counter[tuple[str, str]] = Counter()
    moments = []
    for i, name in enumerate(names):
        if i >= first and name[0] != "abort":
            moments.append((*name, seen[name]))
        seen[name] += 1
    return moments


def save(
    run: Path, monkeypatch: pytest.MonkeyPatch, *specs: dict[str, object], meanwhile: Callable[[], None] = lambda: None
) -> CkptError | None:
    """Save steps 1 and 2 by a keeper of its own, the store of which is wrapped; what came of step 2."""
    monkeypatch.setenv("CKPT_JOB", uuid.uuid4().hex)
    monkeypatch.setenv(*next(iter(store_env(*({**spec, "program": "keeper"} for spec in specs)).items())))
    opened = Run.open(run)
    writer = opened.open_writer(job="zombie", world=1, resumed_from=None).number
    with KeeperClient.connect(0) as client:
        stage(client, opened.url, 1, 1, writer=writer).wait(30)
        pending = stage(client, opened.url, 2, 2, writer=writer)
        meanwhile()
        try:
            pending.wait(30)
        except CkptError as error:
            return error
    return None


def at_every_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Run], object]
) -> Iterator[tuple[Moment, Run, bool, CkptError | None]]:
    """(the moment, the run, whether step 2 had its COMMIT when ``act`` was done there, what its save ended with)."""
    for number, moment in enumerate(moments_of_a_save(folder, monkeypatch)):
        operation, key, before = moment
        place = folder / f"moment-{number}"
        place.mkdir()
        release, waiting = place / "release", place / "waiting"
        run, had = Run.open(place / "run"), []

        def meanwhile(waiting: Path = waiting, release: Path = release, run: Run = run, had: list[bool] = had) -> None:
            wait_for(waiting.exists, "the keeper stands before the operation")
            had.append(any(state.commit is not None and state.attempt.step == 2 for state in run.survey().steps))
            act(run)
            release.touch()

        block = {"wrap": "blocking", "release": release, "waiting": waiting, "on_nth": before + 1}
        block |= {"operation": operation, "match": key}
        error = save(place / "run", monkeypatch, block, meanwhile=meanwhile)
        yield moment, run, had[0], error
