"""Frames, the handshake, and those who do not keep to them."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckpt.errors import KeeperError
from ckpt.format.part import RankTensor
from ckpt.keeper import place, protocol, start
from ckpt.keeper.client import KeeperClient
from ckpt.plan.retention import Best, KeepPolicy
from tests.keeper.conftest import is_alive, wait_for
from tests.keeper.rank_process import stage


def test_messages_round_trip():
    """Each message comes out of a frame as it went in."""
    file = protocol.FileTask("model", "m", 4096, 10, 4, (6,))
    task = protocol.SaveTask(
        run="/r", step=1, writer=2, save=3, rank=0, world=1, arena=4, encode="raw", files=(file,), layout="d",
        rank_tensors=(RankTensor("x", "int8", (2,)),), values={"a": [1, {"t": "f", "v": "0x1p0"}, None, "é", 0.5]},
        values_digests={"a": "b"}, rank_values={"r": True}, layouts=(protocol.LayoutTask("d", b"\0\xff", ((0, 0),)),),
        hf_index=b"{}", metrics=b"{}", keep=KeepPolicy(3, 10, Best("loss", 2, "max")),
    )  # fmt: skip
    said = [
        protocol.Hello(b"n"), protocol.Answer(b"p", 3), protocol.Answer(b"p", None), protocol.ArenaRequest(1, "/r", 9),
        protocol.ArenaRelease(2), protocol.Begin(1, task), protocol.Ready(1, 9),
        protocol.Abandon("/r", 1, 2, 3, 0, 1, "why"), protocol.Bye(done=False), protocol.StatusRequest(7),
    ]  # fmt: skip
    buffer = protocol.FrameBuffer(limit_nbytes=1 << 20)
    stream = b"".join(map(protocol.pack, said))
    heard = []
    for i in range(len(stream)):  # one byte at a time
        buffer.feed(stream[i : i + 1])
        while (frame := buffer.frame()) is not None:
            heard.append(protocol.from_client.decode(frame))
    assert heard == said


def test_a_frame_says_its_size_first():
    """A frame that claims too much is refused before it is there."""
    buffer = protocol.FrameBuffer(limit_nbytes=100)
    buffer.feed(struct.pack(">I", 101))
    with pytest.raises(KeeperError, match="a frame of 101 bytes, at most 100"):
        buffer.frame()


def test_a_line_that_never_ends():
    """What does not begin with a version line is no peer."""
    buffer = protocol.FrameBuffer()
    buffer.feed(b"GET / HTTP/1.1\r")
    assert buffer.line() is None
    buffer.feed(b"x" * 100)
    with pytest.raises(KeeperError, match="another protocol"):
        buffer.line()


def test_proofs_differ_by_role_and_nonce():
    """A proof cannot be used again, nor sent back."""
    proofs = {
        protocol.prove(bytes(32), role, a, b)
        for role in ("client", "keeper")
        for a in (b"1", b"2")
        for b in (b"3", b"4")
    }
    assert len(proofs) == 8


class Stranger:
    """A raw connection to the keeper."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(place.here().path("sock"))

    def heard(self) -> bytes:
        """All that the keeper says until it closes."""
        received = b""
        while more := self.socket.recv(1 << 16):
            received += more
        self.socket.close()
        return received


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (protocol.PREAMBLE + struct.pack(">I", 1 << 31), b"a frame of 2147483648 bytes, at most 4096"),
        (protocol.PREAMBLE + _frame(b"\xc1garbage"), b"no message"),
        (protocol.PREAMBLE + _frame(msgspec.msgpack.encode({"type": "hello"})), b"no message"),
        (protocol.PREAMBLE + _frame(b"\x91" * 4000 + b"\xc0"), b"no message"),
        (protocol.PREAMBLE + protocol.pack(protocol.Bye(done=True)), b"sent Bye before it had proved itself"),
        (protocol.PREAMBLE + protocol.pack(protocol.Answer(b"", 0)), b"sent Answer before it had proved itself"),
        (protocol.PREAMBLE + protocol.pack(protocol.Hello(b"n")) + protocol.pack(protocol.Answer(bytes(64), 0)),
         b"does not know this keeper's secret"),
        (b"\0" * 200, b"another protocol"),
    ],
)  # fmt: skip
def test_a_hostile_client_is_shown_out_and_others_are_served(folder: Path, url: str, sent: bytes, why: bytes):
    """Whatever it sends, it is told why and closed; a save by another client goes through."""
    with KeeperClient.connect(0) as client:
        stranger = Stranger()
        stranger.socket.sendall(sent)
        assert why in stranger.heard()
        stage(client, url, 1, 1).wait(30)
        assert is_alive(client.keeper_pid)
    assert why.decode() in _log(folder)


def test_another_version_is_told_ours(folder: Path):
    """A client of another version hears which one this keeper speaks, and nothing else."""
    with KeeperClient.connect(0):
        stranger = Stranger()
        stranger.socket.sendall(b"ckpt-keeper/999\n" + b"whatever that version says")
        assert stranger.heard() == protocol.PREAMBLE


def test_a_keeper_of_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The client says both versions."""
    with KeeperClient.connect(0):
        monkeypatch.setattr(protocol, "PREAMBLE", b"ckpt-keeper/4\n")
        with pytest.raises(KeeperError, match=r"ckpt-keeper/3.*ckpt-keeper/4.*another version"):
            KeeperClient.connect(1)


def test_a_wrong_secret_is_found_by_the_client(folder: Path):
    """Who listens but does not know the secret gets no proof of ours."""
    with KeeperClient.connect(0):
        secret = Path(place.here().path("secret"))
        right = secret.read_bytes()
        secret.write_bytes(bytes(start.SECRET_NBYTES))
        with pytest.raises(KeeperError, match="does not know the keeper's secret"):
            KeeperClient.connect(1)
        secret.write_bytes(right)


def test_silent_connections_do_not_keep_a_keeper(folder: Path):
    """A connection without a handshake is closed after a while, and is no client."""
    client = KeeperClient.connect(0)
    stranger = Stranger()
    client.close()
    assert stranger.heard() == b""
    wait_for(lambda: not is_alive(client.keeper_pid), "the keeper is gone")


def test_a_message_too_large_for_a_frame(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    """It is refused before it is sent, and the connection goes on."""
    with KeeperClient.connect(0) as client:
        monkeypatch.setattr(protocol, "FRAME_LIMIT_NBYTES", 200)
        with pytest.raises(KeeperError, match="keep large values in tensors"):
            stage(client, url, 1, 1)
        monkeypatch.undo()


def _log(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.log"))


def test_layouts_are_sent_once_to_a_connection():
    """They can be larger than all else in a task; one that was never sent is refused."""
    first = protocol.LayoutTask("a" * 32, b"first", ((0, 0),))
    second = protocol.LayoutTask("b" * 32, b"second", ((1, 1),))
    task = a_task(layouts=(first, second))
    known: frozenset[str] = frozenset()
    kept: dict[str, bytes] = {}
    sent = []
    for layouts in ((first, second), (first, second), (first,), (first, second), ()):
        whole = msgspec.structs.replace(task, layouts=layouts)
        brief, known = protocol.brief(whole, known)
        sent.append([layout.raw for layout in brief.layouts])
        again, kept = protocol.whole(brief, kept)
        assert again == whole
    assert sent == [[b"first", b"second"], [b"", b""], [b""], [b"", b"second"], []]
    with pytest.raises(KeeperError, match="without its layouts"):
        protocol.whole(brief_of(first), {})


def brief_of(layout: protocol.LayoutTask) -> protocol.SaveTask:
    """A task that takes for granted that the keeper has the layout."""
    return a_task(layouts=(msgspec.structs.replace(layout, raw=b""),))


def a_task(**fields: Any) -> protocol.SaveTask:
    """A task for nothing."""
    return protocol.SaveTask(
        run="run", step=1, writer=1, save=1, rank=0, world=1, arena=1, encode="raw", files=(), layout="a" * 32,
        rank_tensors=(), values=None, values_digests={}, rank_values={}, **fields,
    )  # fmt: skip
