"""Finding and starting keepers: one per job, safe folders, quick, without torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import KeeperError
from ckpt.keeper import place, start
from ckpt.keeper.client import KeeperClient
from tests.keeper.conftest import ROOT, Trainer, is_alive, wait_for

Trainers = Callable[..., Trainer]


def test_eight_ranks_at_once_start_one_keeper(folder: Path):
    """However the race goes, all get the same keeper."""
    code = (
        "import sys; from ckpt.keeper.client import KeeperClient; sys.stdin.readline();"
        "c = KeeperClient.connect(int(sys.argv[1])); print(c.keeper_pid, flush=True); sys.stdin.readline(); c.close()"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        for rank in range(8)
    ]
    for line in (b"go\n", b"end\n"):
        for rank in ranks:
            rank.stdin.write(line)
            rank.stdin.flush()
        if line == b"go\n":
            pids = {int(rank.stdout.readline()) for rank in ranks}
    assert len(pids) == 1
    for rank in ranks:
        rank.communicate()
        assert rank.returncode == 0


def test_connecting_while_keepers_end(folder: Path):
    """Each connection comes just as the keeper before it is about to end; none is lost, and none refused."""
    for _ in range(30):
        client = KeeperClient.connect(0)
        client.release(client.arena(1))
        client.close()


def test_it_starts_quickly_and_without_torch(folder: Path):
    """Bound: 1.5 s on a busy machine (0.1 s measured on an idle one); no torch, no numpy in the process."""
    started = time.monotonic()
    with KeeperClient.connect(0) as client:
        assert time.monotonic() - started < 1.5
        maps = Path(f"/proc/{client.keeper_pid}/maps").read_text()
        assert "msgspec" in maps
        assert "torch" not in maps
        assert "numpy" not in maps


def test_no_module_of_the_keeper_imports_torch():
    """Importing all that a keeper runs leaves torch and numpy alone."""
    code = (
        "import sys, ckpt.keeper.__main__, ckpt.keeper.client;"
        "sys.exit(bool({'torch', 'numpy', 'fsspec', 'logging'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_keeper_of_its_own_session(folder: Path):
    """It has its own session and folder /, reads nothing, and holds no descriptor of its starter."""
    with open(os.devnull) as extra, KeeperClient.connect(0) as client:
        os.set_inheritable(extra.fileno(), True)
        pid = client.keeper_pid
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{pid}/fd/2") == str(next(folder.glob("*.log")))


def test_a_stale_socket_and_a_torn_lock_file(folder: Path):
    """What a killed keeper, or a starter that was killed half-way, leaves is no hindrance."""
    client = KeeperClient.connect(0)
    os.kill(client.keeper_pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(client.keeper_pid), "the keeper is gone")
    client.close()
    assert len(list(folder.glob("*.sock"))) == 1
    with KeeperClient.connect(0) as again:
        assert is_alive(again.keeper_pid)
        orphan = again.keeper_pid
        next(folder.glob("*.lock")).write_text("")
        with KeeperClient.connect(0) as third:
            assert third.keeper_pid != orphan
    wait_for(lambda: not (is_alive(orphan) or is_alive(third.keeper_pid)), "both keepers are gone")
    assert os.listdir(folder) == []


def test_a_socket_that_a_forked_child_keeps_listening(folder: Path):
    """A dead keeper whose listening socket lives on in some child does not catch new clients."""
    where = place.here()
    os.makedirs(where.folder, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where.path("sock"))
        listener.listen()
        Path(where.path("secret")).write_bytes(bytes(start.SECRET_NBYTES))
        Path(where.path("lock")).write_text(f"{os.getpid()}.12345")
        with KeeperClient.connect(0) as client:
            assert is_alive(client.keeper_pid)


def test_a_held_lock_is_not_waited_for_for_ever(folder: Path):
    """A lock that is never let go gives an error that names the file."""
    where = place.here()
    with (
        start.locked(where),
        pytest.raises(KeeperError, match=r"\.lock: locked by another process"),
        start.locked(where, 0.05),
    ):
        pass


def test_a_folder_that_is_longer_than_a_socket_address(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A socket's address holds 107 bytes; the folder may be longer."""
    long = tmp_path / ("x" * 100) / ("y" * 100)
    long.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with KeeperClient.connect(0) as client:
        assert is_alive(client.keeper_pid)
    wait_for(lambda: not is_alive(client.keeper_pid), "the keeper is gone")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int):
    """Whoever can write there could pose as the keeper."""
    folder.mkdir(mode=0o700)
    folder.chmod(mode)
    with pytest.raises(KeeperError, match="nobody else can write"):
        KeeperClient.connect(0)


def test_a_folder_that_is_a_link_or_a_file_is_refused(folder: Path, tmp_path: Path):
    """The folder itself must be ours, not what somebody put in its place."""
    folder.symlink_to(tmp_path)
    with pytest.raises(KeeperError, match="not a folder of user"):
        place.runtime_folder()
    folder.unlink()
    folder.touch()
    with pytest.raises(KeeperError, match="not a folder of user"):
        place.runtime_folder()
    folder.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_refused(folder: Path):
    """However its mode is."""
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(KeeperError, match="not a folder of user 0"):
        place.runtime_folder()


def test_modes(folder: Path):
    """The folder is 0700, the secret 0600."""
    with KeeperClient.connect(0):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert next(folder.glob("*.secret")).stat().st_mode & 0o777 == 0o600


def test_without_a_runtime_folder_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """XDG_RUNTIME_DIR counts only if it is ours; else the folder is in /tmp."""
    for value in ("", str(tmp_path / "absent")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert place.runtime_folder() == f"/tmp/ckpt-{os.geteuid()}"


def test_job_identity(monkeypatch: pytest.MonkeyPatch):
    """CKPT_JOB wins; torchelastic's id goes with the scheduler's and the agent; else it is this process."""
    monkeypatch.setattr(place, "_identities", {})
    monkeypatch.setenv("CKPT_JOB", "mine")
    assert place.job_identity() == "CKPT_JOB=mine"
    monkeypatch.delenv("CKPT_JOB")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    agent = place.process_identity(os.getppid())
    assert place.job_identity() == f"SLURM_JOB_ID=77 torchelastic=run agent={agent}"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert place.job_identity().endswith(agent), "who we are does not change while we live"
    monkeypatch.setattr(place, "_identities", {})
    assert place.job_identity() == f"process={place.process_identity(os.getpid())}"


def test_a_zombie_is_no_process():
    """A process that nobody has waited for is as dead as one that is gone."""
    process = subprocess.Popen(["true"])
    wait_for(lambda: place.process_identity(process.pid) == "", "the process has ended")
    process.wait()
    assert place.process_identity(1 << 22) == ""
