"""Kill points: a process dies by SIGKILL right before, halfway through or right after one chosen system call.

Points are the calls by which Python code changes storage and the messages between a trainer and its keeper, all of
them, since they are found where they are made (``ckpt.testing.system_calls``, ``ckpt.testing.messages``) and not
marked in the code under test. A point has a name that says process, moment, call and what it is about::

    keeper: before link step-00000002-w2.1/COMMIT
    keeper: halfway through write step-00000002-w2.1/model-00000-of-00001.safetensors
    trainer: after send begin
    trainer: after receive staged (2)

where ``(2)`` counts what is called alike in that process. Run an operation once to have its points recorded, then once
for each of them, in processes with the environment of ``kill_env``. A process of Python that is started with it watches
from its first instruction on (``sitecustomize``); one that is forked calls ``install``.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.testing import messages, system_calls
from ckpt.testing.system_calls import Half, Proceed, StorageCall

KILL_ENV = "CKPT_TEST_KILL_POINTS"  # JSON, see kill_env

_START = """# Written by ckpt.testing.kill_points: Python imports this before anything else.
import ckpt.testing.kill_points

ckpt.testing.kill_points.install()
"""
_RANDOM = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?=\.(?:unfinished|lock|log|secret|sock|json)$)")


@dataclass(frozen=True)
class Point:
    """One kill point, in one process."""

    process: str
    when: str  # "before", "halfway through", "after"
    call: str
    what: str
    nth: int  # from 1, of those called alike

    def __str__(self) -> str:
        again = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.process}: {self.when} {self.call} {self.what}{again}"


@dataclass(frozen=True)
class Event:
    """One line of a record: a point that was passed, and of a storage call what it did."""

    point: Point
    pid: int
    call: StorageCall | None


def kill_env(
    folder: str | os.PathLike[str],
    scopes: Mapping[str, str | os.PathLike[str]],
    *,
    record: str | os.PathLike[str],
    process: str = "trainer",
    kill: Point | str | None = None,
) -> dict[str, str]:
    """The environment for processes to be recorded or killed.

    ``folder`` is for this module's start-up file. ``scopes`` are the folders to watch, each with the name that it has
    in those of points ("" for the main one). ``record`` is a file to which every process appends what it passes.
    ``process`` is what processes are called; a keeper is always called ``keeper``. The first process that comes to
    the point ``kill`` dies there, and no other one.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    start = Path(folder, "sitecustomize.py")
    if not start.exists():
        start.write_text(_START)
    root = str(Path(__file__).parent.parent.parent)
    known = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    spec = {
        "scopes": {name: os.path.realpath(path) for name, path in scopes.items()},
        "record": os.path.abspath(record),
        "process": process,
        "kill": None if kill is None else str(kill),
    }
    return {KILL_ENV: json.dumps(spec), "PYTHONPATH": os.pathsep.join([str(folder), *known, root])}


def install() -> Callable[[], None]:
    """Watch this process as ``kill_env`` says, if it says so at all. What is returned ends the watching of storage."""
    text = os.environ.get(KILL_ENV)
    if not text:
        return lambda: None
    spec = json.loads(text)
    is_keeper = "ckpt.keeper" in sys.orig_argv
    passing = _Passing("keeper" if is_keeper else spec["process"], spec["scopes"], spec["record"], spec["kill"])
    messages.interpose(passing.sending, passing.received)
    return system_calls.interpose(passing.storage, passing.is_watched)


def read_record(path: str | os.PathLike[str]) -> list[Event]:
    """What all processes have passed, in the order in which they did."""
    events = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        call = fields.get("storage")
        if call is not None:
            call = StorageCall(**{**call, "payload": base64.b64decode(call["payload"])})
        events.append(Event(Point(*fields["point"]), fields["pid"], call))
    return events


def died_at(record: str | os.PathLike[str]) -> str | None:
    """The name of the point at which a process died; None when none has come to it."""
    try:
        return Path(f"{os.fspath(record)}.died").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


class _Passing:
    """Counts, writes down and dies, in one process."""

    def __init__(self, process: str, scopes: Mapping[str, str], record: str, kill: str | None) -> None:
        self._process, self._scopes, self._kill = process, scopes, kill
        self._died = f"{record}.died"
        self._file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._write, self._open = os.write, os.open  # before they are replaced
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.RLock()  # a signal's handler may pass a point while its own thread does

    def is_watched(self, path: str) -> bool:
        """Whether a path lies in one of the scopes, or is one."""
        return any(path == root or path.startswith(f"{root}/") for root in self._scopes.values())

    def storage(self, call: StorageCall, proceed: Proceed, half: Half) -> Any:
        """A storage call."""
        what = self._name(call)
        self._pass("before", call.name, what)
        if half is not None:
            self._pass("halfway through", call.name, what, first=half)
        result = proceed()
        self._pass("after", call.name, what, call)
        return result

    def sending(self, names: list[str], proceed: Callable[[], int], half: Callable[[], Any]) -> int:
        """A call that sends messages."""
        for name in names:
            self._pass("before", "send", name)
        self._pass("halfway through", "send", " and ".join(names), first=half)
        nbytes = proceed()
        for name in names:
            self._pass("after", "send", name)
        return nbytes

    def received(self, names: list[str]) -> None:
        """Messages have come."""
        for name in names:
            self._pass("after", "receive", name)

    def _name(self, call: StorageCall) -> str:
        scope, root = max(
            ((name, root) for name, root in self._scopes.items() if f"{call.path}/".startswith(f"{root}/")),
            key=lambda found: len(found[1]),
        )
        inside = _RANDOM.sub("…", call.path[len(root) + 1 :])
        slash = "/" if call.is_folder and inside else ""
        return f"{scope}/{inside}{slash}" if scope else f"{inside}{slash}" or "./"

    def _pass(self, when: str, call: str, what: str, storage: StorageCall | None = None, *, first: Half = None) -> None:
        """Pass a point, or do ``first`` and die there."""
        with self._lock:
            self._counts[when, call, what] += 1
            point = Point(self._process, when, call, what, self._counts[when, call, what])
            fields: dict[str, Any] = {
                "point": [point.process, point.when, point.call, point.what, point.nth], "pid": os.getpid()
            }  # fmt: skip
            if storage is not None:
                fields["storage"] = {**storage.__dict__, "payload": base64.b64encode(storage.payload).decode()}
            self._write(self._file, (json.dumps(fields) + "\n").encode())
            if str(point) == self._kill:
                self._die(point, first)

    def _die(self, point: Point, first: Half) -> None:
        try:
            died = self._open(self._died, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # another process was to die there, and has
            return
        self._write(died, str(point).encode())
        if first is not None:
            first()
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # the signal is on its way; not one more instruction of the test's code
        return
