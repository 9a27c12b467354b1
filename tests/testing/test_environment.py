from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import ckpt.testing
from ckpt.errors import BadInputError, StoreError
from ckpt.store import TEST_STORE_ENV, LocalStore, open_store
from ckpt.testing import FaultyStore, RecordingStore, read_log, store_env


def use(monkeypatch: pytest.MonkeyPatch, *specs: dict[str, object]) -> None:
    for name, value in store_env(*specs).items():
        monkeypatch.setenv(name, value)


def test_without_the_variable_nothing_is_wrapped(tmp_path, monkeypatch):
    """A store is a plain one, and the testing room is not even imported."""
    monkeypatch.delenv(TEST_STORE_ENV, raising=False)
    assert type(open_store(tmp_path)) is LocalStore
    script = "import sys; from ckpt.store import open_store; open_store('/x'); sys.exit('ckpt.testing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_testing_room_needs_no_pytest():
    """The keeper of a test is wrapped without importing pytest, or torch."""
    script = "import sys, ckpt.testing; sys.exit('pytest' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_one_wrapper_may_stand_alone(tmp_path, monkeypatch):
    """An object in place of a list is taken; its options reach the wrapper."""
    spec = {
        "wrap": "faulty",
        "match": "part-*",
        "operation": "create",
        "errno": "ENOSPC",
        "after_nbytes": 3,
        "on_nth": 2,
    }
    monkeypatch.setenv(TEST_STORE_ENV, json.dumps(spec))
    store = open_store(tmp_path / "run")
    store.create("step/part-0", b"12345")
    with pytest.raises(StoreError, match=r"part-1: cannot write: no space left on the device after 3 bytes"):
        store.create("step/part-1", b"12345")
    assert store.list("step") == ["part-0"]


def test_a_list_is_stacked_outwards(tmp_path, monkeypatch):
    """The last wrapper is outermost: a recorder after a fault sees it fail."""
    use(monkeypatch, {"wrap": "faulty", "operation": "get"}, {"wrap": "recording", "log": tmp_path / "log"})
    store = open_store(tmp_path / "run")
    assert isinstance(store, RecordingStore)
    assert isinstance(store.inner, FaultyStore)
    assert store.url == str(tmp_path / "run")
    with pytest.raises(StoreError):
        store.get("key")
    assert [(done.op, done.outcome) for done in read_log(tmp_path / "log")] == [("get", "StoreError")]


def test_counts_run_over_all_stores_of_a_process(tmp_path, monkeypatch):
    """However often a process opens the run, the second create is the second."""
    use(monkeypatch, {"wrap": "faulty", "operation": "create", "on_nth": 2, "message": str(tmp_path)})
    open_store(tmp_path / "run").create("1", b"")
    with pytest.raises(StoreError):
        open_store(tmp_path / "run").create("2", b"")
    open_store(tmp_path / "run").create("2", b"")


def test_all_kinds_can_be_named(tmp_path, monkeypatch):
    """Each kind opens with its options; paths may be Path."""
    use(
        monkeypatch,
        {"wrap": "slow", "delay_s": 0.0, "match": "*"},
        {"wrap": "blocking", "match": "*", "release": tmp_path, "waiting": tmp_path / "waiting"},
        {"wrap": "crash", "at": 17, "after": True, "log": tmp_path / "log"},
        {"wrap": "recording", "log": tmp_path / "record"},
    )
    open_store(tmp_path / "run").create("key", b"x")
    assert (tmp_path / "run" / "key").read_bytes() == b"x"
    assert (tmp_path / "log").read_text() == "0 create key 1\n"


def test_another_process_gets_it(tmp_path):
    """A child with the variable in its environment meets the fault; ``program`` picks which child."""
    script = "import sys; from ckpt.store import open_store; open_store(sys.argv[1]).create(sys.argv[2], b'x')"
    environment = {**os.environ, **store_env({"wrap": "faulty", "errno": "ENOSPC", "program": "keeper-like"})}
    for name, returncode in (("trainer-like", 0), ("keeper-like", 1)):
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path / "run", name],
            env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == returncode, done.stderr
    assert "no space left" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ('{"wrap": "fauly"}', "one of"),
        ('{"match": "*"}', "one of"),
        ("[1]", "one of"),
        ('{"wrap": "slow", "delay": 1}', "slow: .*delay"),
        ('{"wrap": "faulty", "errno": "EWHAT"}', "unknown errno"),
        ('{"wrap": "blocking"}', "release"),
    ],
)
def test_a_wrong_variable_is_refused(tmp_path, monkeypatch, text, said):
    """A test that would silently test nothing fails instead, where it is written and where it is read."""
    monkeypatch.setenv(TEST_STORE_ENV, text)
    with pytest.raises(BadInputError, match=said):
        open_store(tmp_path)


def test_store_env_checks_its_wrappers():
    """A spelling error shows in the test, not in a process that it starts."""
    with pytest.raises(BadInputError, match="delay"):
        store_env({"wrap": "slow", "delay": 1})
    with pytest.raises(BadInputError, match="one of"):
        store_env({"wrap": "crush"})


def test_public_names_are_sorted_and_true():
    """``__all__`` holds what there is, and an unknown name is an AttributeError."""
    assert sorted(set(ckpt.testing.__all__)) == sorted(ckpt.testing.__all__)
    assert [name for name in ckpt.testing.__all__ if not hasattr(ckpt.testing, name)] == []
    with pytest.raises(AttributeError, match="NoSuchStore"):
        ckpt.testing.NoSuchStore  # noqa: B018 - the look-up is the test
