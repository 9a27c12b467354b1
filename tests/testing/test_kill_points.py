from __future__ import annotations

import contextlib
import io
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ckpt.testing import messages
from ckpt.testing.kill_points import KILL_ENV, Point, died_at, install, kill_env, read_record

PROGRAM = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
os.mkdir(folder / "d")
file = os.open(folder / "d/one", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
os.pwrite(file, b"0123456789", 0)
os.fsync(file)
above = os.open(folder / "d", os.O_RDONLY)
unnamed = os.open(".", os.O_TMPFILE | os.O_WRONLY, dir_fd=above)
os.write(unnamed, b"x")
os.link(f"/proc/self/fd/{unnamed}", "two", src_dir_fd=above, dst_dir_fd=above, follow_symlinks=True)
os.fsync(above)
(folder / "text").write_text("hello")
with open(folder / "text", "a") as more:
    more.write("!")
assert (folder / "text").read_text() == "hello!"
os.unlink("two", dir_fd=above)
(folder / "d/one").unlink()
os.rmdir("d", dir_fd=os.open(folder, os.O_RDONLY))
(folder.parent / "elsewhere").write_text("not watched")
"""
POINTS = [
    *("before mkdir d/", "after mkdir d/"),
    *("before open d/one", "after open d/one"),
    *("before write d/one", "halfway through write d/one", "after write d/one"),
    *("before fsync d/one", "after fsync d/one"),
    *("before open d/(unnamed)", "after open d/(unnamed)"),
    *("before write d/(unnamed)", "after write d/(unnamed)"),  # one byte has no half
    *("before link d/two", "after link d/two"),
    *("before fsync d/", "after fsync d/"),
    *("before open text", "after open text"),
    *("before write text", "halfway through write text", "after write text"),
    *("before write text (2)", "after write text (2)"),
    *("before unlink d/two", "after unlink d/two"),
    *("before unlink d/one", "after unlink d/one"),
    *("before rmdir d", "after rmdir d"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The watched folder."""
    (tmp_path / "watched").mkdir()
    return tmp_path / "watched"


def start(folder: Path, record: Path, kill: str | None = None, code: str = PROGRAM) -> int:
    """Run a program to its end; its exit code."""
    env = {**os.environ, **kill_env(folder.parent / "start", {"": folder}, record=record, process="p", kill=kill)}
    return subprocess.run([sys.executable, "-c", code, str(folder)], env=env, check=False).returncode


def test_every_change_has_its_points(folder: Path, tmp_path: Path) -> None:
    """Each call that changes the folder, by its name, in the order of the program; nothing outside of it."""
    assert start(folder, tmp_path / "record") == 0
    events = read_record(tmp_path / "record")
    assert [str(event.point) for event in events] == [f"p: {name}" for name in POINTS]
    assert (tmp_path / "elsewhere").exists()
    calls = [event.call for event in events if event.call is not None]
    written = [(Path(call.path).name, call.offset, call.payload) for call in calls if call.name == "write"]
    assert written == [("one", 0, b"0123456789"), ("(unnamed)", 0, b"x"), ("text", 0, b"hello"), ("text", 5, b"!")]
    assert len({call.inode for call in calls if call.path.endswith(("(unnamed)", "two")) and call.inode}) == 1


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("before mkdir d/", {}),
        ("after open d/one", {"d/one": b""}),
        ("halfway through write d/one", {"d/one": b"01234"}),
        ("after write d/one", {"d/one": b"0123456789"}),
        ("before link d/two", {"d/one": b"0123456789"}),
        ("after link d/two", {"d/one": b"0123456789", "d/two": b"x"}),
        ("before write text (2)", {"d/one": b"0123456789", "d/two": b"x", "text": b"hello"}),
        ("after rmdir d", {"text": b"hello!"}),
    ],
)
def test_a_process_dies_there(name: str, left: dict[str, bytes], folder: Path, tmp_path: Path) -> None:
    """By SIGKILL, with what it had done done, and nothing more."""
    assert start(folder, tmp_path / "record", f"p: {name}") == -signal.SIGKILL
    assert died_at(tmp_path / "record") == f"p: {name}"
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == left


def test_only_the_first_process_dies(folder: Path, tmp_path: Path) -> None:
    """Whoever is started after it, with the same environment, lives."""
    point = Point("p", "before", "write", "text", 2)
    assert start(folder, tmp_path / "record", str(point)) == -signal.SIGKILL
    (folder / "text").unlink()
    (folder / "d/one").unlink()
    (folder / "d/two").unlink()
    (folder / "d").rmdir()
    assert start(folder, tmp_path / "record", str(point)) == 0


def test_what_goes_past_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is not known, or not made through os, cannot be missed: it raises."""
    (folder / "a").write_bytes(b"1234")
    for name, value in kill_env(tmp_path / "start", {"": folder}, record=tmp_path / "record").items():
        monkeypatch.setenv(name, value)
    end = install_storage(monkeypatch)
    try:
        with pytest.raises(RuntimeError, match="does not know this call"):
            os.replace(folder / "a", folder / "b")
        with pytest.raises(RuntimeError, match="past the functions of os"):
            io.FileIO(folder / "new", "w")
        with open(folder / "a", "rb+") as file, pytest.raises(RuntimeError, match="past the functions of os"):
            mmap.mmap(file.fileno(), 4)
        os.replace(tmp_path / "record", tmp_path / "elsewhere")
    finally:
        end()
    os.replace(folder / "a", folder / "b")
    assert sorted(os.listdir(folder)) == ["b"]


def install_storage(monkeypatch: pytest.MonkeyPatch):
    """``install`` without the messages, which would be watched for ever."""
    monkeypatch.setattr(messages, "interpose", lambda *_: None)
    return install()


def test_nothing_is_watched_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function is replaced."""
    monkeypatch.delenv(KILL_ENV, raising=False)
    before = (os.open, socket.socket.send)
    install()()
    assert (os.open, socket.socket.send) == before


TALK = """
import socket, struct, sys, msgspec
class Begin(msgspec.Struct, tag="begin"): size: int
class Staged(msgspec.Struct, tag="staged"): size: int
def frame(message):
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body
ours = socket.socket(fileno=int(sys.argv[2]))
ours.sendall(b"ckpt-keeper/3\\n" + frame(Begin(1)))
ours.sendmsg([frame(Begin(2))])
received = b""
while len(received) < int(sys.argv[3]):
    received += ours.recv(7)
ours.send(frame(Staged(3)))
"""


@pytest.mark.parametrize("kill", [None, "halfway through send begin", "after receive staged (2)"])
def test_every_message_has_its_points(kill: str | None, folder: Path, tmp_path: Path) -> None:
    """Sent and received, by their tags, however they are cut up on their way."""
    ours, theirs = socket.socketpair()
    environment = kill_env(
        tmp_path / "start", {"": folder}, record=tmp_path / "record", process="p", kill=kill and f"p: {kill}"
    )
    staged = msgspec.msgpack.encode({"type": "staged", "size": 3})
    sent = b"ckpt-keeper/3\n" + (len(staged).to_bytes(4, "big") + staged) * 2
    process = subprocess.Popen(
        [sys.executable, "-c", TALK, str(folder), str(theirs.fileno()), str(len(sent))],
        env={**os.environ, **environment}, pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    ours.sendall(sent)
    ours.settimeout(30)
    came = b""
    with contextlib.suppress(ConnectionResetError):  # it died before it had read all
        while received := ours.recv(4096):
            came += received
    assert process.wait(30) == (0 if kill is None else -signal.SIGKILL)
    ours.close()
    names = [str(event.point).removeprefix("p: ") for event in read_record(tmp_path / "record")]
    whole = [
        *("before send the version", "before send begin", "halfway through send the version and begin"),
        *("after send the version", "after send begin"),
        *("before send begin (2)", "halfway through send begin", "after send begin (2)"),
        *("after receive the version", "after receive staged", "after receive staged (2)"),
        *("before send staged", "halfway through send staged", "after send staged"),
    ]
    assert names == whole[: len(whole) if kill is None else whole.index(kill) + 1]
    begin = msgspec.msgpack.encode({"type": "begin", "size": 2})
    if kill == "halfway through send begin":
        assert came.endswith((len(begin).to_bytes(4, "big") + begin)[: (4 + len(begin)) // 2])
