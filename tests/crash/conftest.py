"""A place for jobs and their keepers per test, in which nothing is left when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.jobs import NBYTES, Job, keepers_of
from tests.members import leave_nothing


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run's root, which does not exist yet."""
    return str(tmp_path / "run")


@pytest.fixture
def jobs(tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Starts jobs, ``jobs(world, **environment)``, as torchrun would; starting the same ``job`` again restarts it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made: list[Job] = []

    def make(world: int = 1, *, job: str = "one", of: str = run, nbytes: int = NBYTES, **env: str) -> Job:
        # LOCAL_WORLD_SIZE: as on a node that has a core for the keeper, which then writes behind the copy.
        environment = {"CKPT_JOB": job, "CKPT_LINGER_S": "20", "LOCAL_WORLD_SIZE": "1", **env}
        made.append(Job(tmp_path, world, of, nbytes, {"XDG_RUNTIME_DIR": str(tmp_path), **environment}))
        return made[-1]

    yield make
    leave_nothing(made, lambda: keepers_of(tmp_path), tmp_path)
