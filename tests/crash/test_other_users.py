"""Another user's processes: refused by our keeper, and not taken for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ckpt.errors import KeeperError
from ckpt.keeper import place, protocol
from ckpt.keeper.client import KeeperClient
from ckpt.run import Run
from tests.keeper.conftest import is_alive, wait_for
from tests.keeper.rank_process import stage
from tests.keeper.steps import check_step

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534
HELLO = protocol.PREAMBLE + protocol.pack(protocol.Hello(bytes(protocol.NONCE_NBYTES)))


def as_user(uid: int, act: Callable[[], object]) -> str:
    """What comes of ``act`` in a process of that user: its result or its error, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _tell(writer, uid, act)
    os.close(writer)
    with open(reader, "rb") as answer:
        text = answer.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


def _tell(writer: int, uid: int, act: Callable[[], object]) -> NoReturn:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            text = str(act())
        except Exception as error:  # noqa: BLE001 - the test decides what was to be expected
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
    finally:
        os._exit(0)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this test's keepers; others may enter the one above it."""
    with tempfile.TemporaryDirectory(prefix="ckpt-keeper-") as above:
        os.chmod(above, 0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", above)
        monkeypatch.setenv("CKPT_JOB", above)
        yield Path(above, "ckpt")


def talk(path: str) -> str:
    """Connect and say hello as a client does; all that is answered."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(path)
        with contextlib.suppress(BrokenPipeError):  # it may have hung up before
            sock.sendall(HELLO)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while received := sock.recv(1 << 16):
                answer += received
    return f"answered {answer.decode(errors='replace')}"


def test_another_user_cannot_reach_the_socket(folder: Path):
    """The folder lets nobody in."""
    with KeeperClient.connect(0) as client:
        path = place.here().path("sock")
        assert as_user(NOBODY, lambda: talk(path)).startswith("PermissionError")
    wait_for(lambda: not is_alive(client.keeper_pid), "the keeper is gone")


def test_another_user_who_reaches_the_socket_is_refused(folder: Path, tmp_path: Path):
    """With folder, socket and secret open to all, it is the kernel's word on who connects that counts."""
    run = Run.open(tmp_path / "run")
    run.open_writer(job="test", world=1, resumed_from=None)
    with KeeperClient.connect(0) as client:
        where = place.here()
        for path, mode in ((str(folder), 0o755), (where.path("sock"), 0o666), (where.path("secret"), 0o644)):
            os.chmod(path, mode)
        secret = Path(where.path("secret"))
        assert as_user(NOBODY, secret.read_bytes) == str(secret.read_bytes()), "it can read the secret"
        assert as_user(NOBODY, lambda: talk(where.path("sock"))) == "answered "
        assert as_user(0, lambda: talk(where.path("sock"))).startswith("answered ckpt-keeper/"), "we are answered"
        log = Path(where.path("log"))
        wait_for(lambda: f"of user {NOBODY}" in log.read_text(), "the log says who was refused")
        stage(client, run.url, 1, 1).wait(30)
    check_step(run.url, 1)
    wait_for(lambda: not is_alive(client.keeper_pid), "the keeper is gone")


def test_a_folder_that_somebody_else_has_made_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Whoever made `/tmp/ckpt-<uid>` before us could pose as the keeper."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    uid = 100_000 + os.getpid()
    folder = Path(f"/tmp/ckpt-{uid}")
    for owner in (0, NOBODY):
        folder.mkdir(mode=0o700)
        try:
            os.chown(folder, owner, owner)
            told = as_user(uid, lambda: KeeperClient.connect(0))
        finally:
            shutil.rmtree(folder)
        assert told == (
            f"KeeperError: {folder}: not a folder of user {uid} that nobody else can write; "
            "remove it, or set XDG_RUNTIME_DIR to a folder of yours"
        )


def test_a_listener_of_another_user_is_not_taken_for_the_keeper(folder: Path):
    """Although it has the right place, and a living process's name in the lock file, it is told nothing."""
    where = place.here()
    reader, writer = os.pipe()
    folder.chmod(0o777)
    child = os.fork()
    if child == 0:
        _listen(where.path("sock"), writer)
    os.close(writer)
    with open(reader, "rb") as heard:
        assert heard.readline() == b"listening\n"
        folder.chmod(0o700)
        Path(where.path("secret")).write_bytes(bytes(32))
        Path(where.path("lock")).write_text(place.process_identity(child))
        with pytest.raises(KeeperError, match=rf"\.sock: belongs to a process of user {NOBODY}, not 0; remove it"):
            KeeperClient.connect(0)
        assert heard.readline() == b"b''\n", "it heard something"
    os.waitpid(child, 0)


def _listen(path: str, writer: int) -> NoReturn:
    """What somebody else would do: take the socket's path, and listen to what comes."""
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            os.write(writer, b"listening\n")
            sock, _ = listener.accept()
            os.write(writer, f"{sock.recv(4096)!r}\n".encode())
    finally:
        os._exit(0)
