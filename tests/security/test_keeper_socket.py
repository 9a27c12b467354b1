"""Clients of the keeper that mean harm: they are shown out, or wait in vain, and the saves of others go through.

Only this user's processes reach the socket (``tests/crash/test_other_users.py``); who does not know the secret is a
stranger.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.errors import KeeperError
from ckpt.keeper import place, protocol, start
from ckpt.keeper.client import KeeperClient
from ckpt.keeper.process import MAX_STRANGERS
from ckpt.run import Run
from tests.fuzz.targets import a_task
from tests.keeper.conftest import is_alive, wait_for
from tests.keeper.rank_process import fill, stage
from tests.keeper.steps import check_step, committed


@contextlib.contextmanager
def strangers(count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(place.here().path("sock"))  # waits while the keeper has not accepted those before
            sock.settimeout(20)
            made.append(sock)
        yield made


def heard(sock: socket.socket) -> bytes:
    """All that comes until the keeper closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(1 << 16):
            received += more
    return received


def ask(link: start.Link, message: protocol.FromClient) -> protocol.FromKeeper:
    """Say one thing; the next thing that is heard."""
    link.socket.sendall(protocol.pack(message))
    return hear(link)


def hear(link: start.Link) -> protocol.FromKeeper:
    """The next message; EOFError when the keeper hangs up."""
    link.socket.settimeout(20)
    while (body := link.frames.frame()) is None:
        received = link.socket.recv(1 << 16)
        if not received:
            raise EOFError
        link.frames.feed(received)
    return protocol.message_of(body, protocol.from_keeper)


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def rss_mib(pid: int) -> int:
    """Memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS:"))


def test_thousands_of_silent_connections(folder: Path, url: str):
    """So many are never open at once; a rank that comes meanwhile is served, and saves."""
    with KeeperClient.connect(0) as client:
        before = descriptors(client.keeper_pid)
        with strangers(20), contextlib.ExitStack() as more:
            for _ in range(100):
                opened = more.enter_context(strangers(20))
                opened[0].sendall(protocol.PREAMBLE)
            assert descriptors(client.keeper_pid) < before + 2 * MAX_STRANGERS + 50
            with KeeperClient.connect(1) as late:
                assert late.keeper_pid == client.keeper_pid
            stage(client, url, 1, 1).wait(30)
        wait_for(lambda: descriptors(client.keeper_pid) <= before + 8, "the strangers are gone")
    check_step(url, 1)


def test_clients_that_drip(folder: Path, url: str):
    """A byte now and then keeps nobody waiting, and no connection open beyond the time for the handshake."""
    with KeeperClient.connect(0) as client, strangers(40) as slow:
        ended = threading.Event()

        def drip() -> None:
            for byte in protocol.PREAMBLE + protocol.pack(protocol.Hello(bytes(2000))):
                for sock in slow:
                    with contextlib.suppress(OSError):
                        sock.send(bytes([byte]))
                if ended.wait(0.02):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        started = time.monotonic()
        stage(client, url, 1, 1).wait(30)
        assert committed(url) == [1]
        for sock in slow:
            assert b"welcome" not in heard(sock)
        assert time.monotonic() - started < 20
        ended.set()
        thread.join()


def test_a_proof_that_was_overheard_is_worth_nothing(folder: Path):
    """It belongs to the nonces of its own connection; nor does the keeper's own proof serve as one."""
    with KeeperClient.connect(0), strangers(2) as (first, second):
        secret = Path(place.here().path("secret")).read_bytes()
        nonce = bytes(protocol.NONCE_NBYTES)
        challenges = []
        for sock in (first, second):
            sock.sendall(protocol.PREAMBLE + protocol.pack(protocol.Hello(nonce)))
            frames = protocol.FrameBuffer()
            while frames.line() is None:
                frames.feed(sock.recv(4096))
            while (body := frames.frame()) is None:
                frames.feed(sock.recv(4096))
            challenges.append(protocol.message_of(body, protocol.from_keeper))
        mine, other = challenges
        assert isinstance(mine, protocol.Challenge)
        assert isinstance(other, protocol.Challenge)
        overheard = protocol.prove(secret, "client", nonce, mine.nonce)
        second.sendall(protocol.pack(protocol.Answer(overheard, 0)))
        assert b"does not know this keeper's secret" in heard(second)
        first.sendall(protocol.pack(protocol.Answer(mine.proof, 0)))
        assert b"does not know this keeper's secret" in heard(first)


def test_a_client_speaks_for_its_own_rank_and_arena_only(folder: Path, url: str, tmp_path: Path):
    """Another rank's arena, rank or run, a size or world that cannot be: refused, and nothing of it is written."""
    other_run = Run.open(tmp_path / "other")
    other_run.open_writer(job="test", world=1, resumed_from=None)
    with KeeperClient.connect(0) as client:
        lent, good = fill(client, url, 1, 1)
        link = start.join(place.here(), 1)
        granted = ask(link, protocol.ArenaRequest(5, url, 5000))
        assert isinstance(granted, protocol.ArenaGrant)
        mine = granted.arena
        tried = [
            (a_task(run=url, rank=1, arena=good.arena), f"arena {good.arena} is not lent to this process"),
            (a_task(run=url, rank=1, arena=10**9), "is not lent"),
            (a_task(run=other_run.url, rank=1, arena=mine, files=()), "the task of another"),
        ]
        for number, (task, why) in enumerate(tried):
            answer = ask(link, protocol.Begin(100 + number, task))
            assert isinstance(answer, protocol.Failed)
            assert why in answer.message
            link.socket.sendall(protocol.pack(protocol.Ready(100 + number, 1 << 40)))
        for nbytes in (-1, 2**63, 2**64 - 1, 2**62):
            answer = ask(link, protocol.ArenaRequest(9, url, nbytes))
            assert isinstance(answer, protocol.Failed), nbytes
        for message in (
            protocol.Ready(4, 2**62),
            protocol.Ready(4, -1),
            protocol.Abandon(url, 9, 1, 9, 1, 2**62, "x"),
            protocol.Abandon(url, 9, 1, 9, -1, 2, "x"),
        ):
            if not isinstance(message, protocol.Abandon) or message.rank == 1:
                link.socket.sendall(protocol.pack(message))
        assert isinstance(ask(link, protocol.StatusRequest(8)), protocol.Status)
        link.socket.sendall(protocol.pack(protocol.Begin(300, a_task(run=url, rank=0, arena=mine))))
        assert "speaks for rank 0" in str(hear(link))
        with pytest.raises((EOFError, ConnectionResetError)):
            hear(link)
        link.socket.close()
        pending = client.begin(good)
        pending.ready(pending.end)
        pending.wait(30)
        assert lent is not None
    check_step(url, 1)
    assert not list(tmp_path.glob("other/step-*"))


def test_abandoning_for_another_rank(folder: Path, url: str):
    """It would fail a save of others."""
    with KeeperClient.connect(0) as client:
        link = start.join(place.here(), 1)
        link.socket.sendall(protocol.pack(protocol.Abandon(url, 1, 1, 1, 0, 1, "no more")))
        assert "speaks for rank 0" in str(hear(link))
        stage(client, url, 1, 1).wait(30)
        link.socket.close()
    check_step(url, 1)


def test_a_client_that_asks_and_never_reads(folder: Path, url: str):
    """Its answers are not kept for ever, and others are served meanwhile."""
    with KeeperClient.connect(0) as client:
        before = rss_mib(client.keeper_pid)
        link = start.join(place.here(), 1)
        question = protocol.pack(protocol.StatusRequest(1)) * 1000
        link.socket.settimeout(20)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(200):
                link.socket.sendall(question)
        stage(client, url, 1, 1).wait(30)
        assert rss_mib(client.keeper_pid) - before < 100
        assert is_alive(client.keeper_pid)
        link.socket.close()
    check_step(url, 1)


def test_a_frame_of_an_honest_size_only(folder: Path):
    """After the proof a frame may be large, but not without limit; it is refused by what it says of itself."""
    with KeeperClient.connect(0):
        link = start.join(place.here(), 1)
        link.socket.sendall((protocol.FRAME_LIMIT_NBYTES + 1).to_bytes(4, "big"))
        assert f"at most {protocol.FRAME_LIMIT_NBYTES}" in str(hear(link))
        link.socket.close()


def test_the_secret_is_for_its_owner(folder: Path):
    """Folder and secret let nobody else in, and the secret stands in no environment and no log."""
    with KeeperClient.connect(0) as client:
        where = place.here()
        assert os.stat(where.folder).st_mode & 0o777 == 0o700
        assert os.stat(where.path("secret")).st_mode & 0o777 == 0o600
        secret = Path(where.path("secret")).read_bytes()
        for text in (
            Path(f"/proc/{client.keeper_pid}/environ"),
            Path(f"/proc/{client.keeper_pid}/cmdline"),
            Path(where.path("log")),
        ):
            assert secret not in text.read_bytes()
            assert secret.hex().encode() not in text.read_bytes()


def test_nonsense_is_no_message():
    """A client that hears it says so, and takes the keeper for lost."""
    with pytest.raises(KeeperError, match="no message"):
        protocol.message_of(b"\xc1", protocol.from_keeper)
    with pytest.raises(KeeperError, match="no message"):
        protocol.message_of(b"\x91" * 3000 + b"\xc0", protocol.from_keeper)
