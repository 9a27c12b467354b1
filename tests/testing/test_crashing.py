from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckpt.errors import BadInputError
from ckpt.store import LocalStore, Store
from ckpt.testing import Crash, CrashStore, store_env

POINTS = [
    "0 create writers/1 1",
    "1 open_sink step-2/model 0",
    "2 write step-2/model 3",
    "3 close step-2/model 3",
    "4 create step-2/COMMIT 1",
    "5 delete step-1/COMMIT 0",
    "6 delete step-1/model 0",
    "7 delete step-1/sub/more 0",
    "8 delete_folder step-1 0",
]


def save(store: Store) -> None:
    """A save that replaces step 1 by step 2."""
    store.create("writers/1", b"1")
    with store.open_sink("step-2/model", 3) as sink:
        sink.write(b"123")
    store.create("step-2/COMMIT", b"1")
    store.delete("step-1/COMMIT")
    store.delete_folder("step-1")


def steps(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/COMMIT"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for key in ("model", "sub/more", "COMMIT"):
        LocalStore(root).create(f"step-1/{key}", b"1")
    return root


def test_the_log_names_all_points(root, tmp_path):
    """A run that is never ended logs each point, the objects of a folder one by one."""
    save(CrashStore(LocalStore(root), log=tmp_path / "log"))
    assert (tmp_path / "log").read_text().splitlines() == POINTS


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(len(POINTS)))
def test_a_sweep_within_one_process(root, tmp_path, at, after):
    """At every point the save stops for good, what was done stays, and there always is a step."""
    store = CrashStore(LocalStore(root), at=at, after=after, how="raise", log=tmp_path / "log")
    with pytest.raises(Crash, match=rf"{'after' if after else 'before'} {POINTS[at].split()[1]}"):
        save(store)
    assert (tmp_path / "log").read_text().splitlines() == POINTS[: at + 1]
    assert steps(root) == [["step-1"], ["step-1", "step-2"], ["step-2"]][(at + after > 4) + (at + after > 5)]
    assert (root / "step-2" / "model").exists() is (at + after > 1), "the dead do not clean up"
    for verb in (store.list, store.open_sink, store.exists):
        with pytest.raises(Crash):
            verb("step-1")


def test_a_crash_is_no_exception():
    """Code that catches every Exception does not survive it."""
    assert not issubclass(Crash, Exception)


def test_past_the_last_point_nothing_happens(root):
    """A number that is not reached is harmless, and so are failed operations before it."""
    store = CrashStore(LocalStore(root), at=len(POINTS), how="raise")
    save(store)
    assert steps(root) == ["step-2"]


def test_only_matching_operations_are_counted(root):
    """A point can be named by key and operation in place of a number among all."""
    with pytest.raises(Crash, match="before create step-2/COMMIT"):
        save(CrashStore(LocalStore(root), at=0, how="raise", operation="create", match="COMMIT"))


def test_how_is_checked(root):
    """A word that is neither is refused."""
    with pytest.raises(BadInputError, match="expected 'kill' or 'raise'"):
        CrashStore(LocalStore(root), how="die")


@pytest.mark.parametrize("at", [1, 4])
def test_the_process_is_killed(root, tmp_path, at):
    """SIGKILL: no handler, no finally, nothing after the point; counted over all stores of the process."""
    script = textwrap.dedent("""
        import atexit, sys
        from ckpt.store import open_store
        atexit.register(print, "atexit")
        try:
            open_store(sys.argv[1]).create("writers/1", b"1")
            with open_store(sys.argv[1]).open_sink("step-2/model", 3) as sink:
                sink.write(b"123")
            open_store(sys.argv[1]).create("step-2/COMMIT", b"1")
        finally:
            print("finally")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, root],
        env={**os.environ, **store_env({"wrap": "crash", "at": at, "log": tmp_path / "log"})},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert (tmp_path / "log").read_text().splitlines() == POINTS[: at + 1]
    assert steps(root) == ["step-1"]
