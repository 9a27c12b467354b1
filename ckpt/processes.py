"""Processes of this node: named for all time, and how they fare. No torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

ALIVE, STOPPED, DEAD = "alive", "stopped", "dead"

_EXITING = 0x4  # PF_EXITING: it ends, and nothing of it runs any more


class ProcessName(msgspec.Struct, frozen=True):
    """A process, named for all time and all hosts: ``start`` tells it from a later one with the same pid."""

    host: str
    pids: str  # processes that have this in common see each other's pids
    pid: int
    start: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class _Stat(msgspec.Struct, frozen=True):
    """What ``/proc/PID/stat`` says of a process that is no zombie."""

    stopped: bool
    exiting: bool
    start: str


def this_process() -> ProcessName:
    """The process that asks."""
    found = _stat(os.getpid())
    return ProcessName(socket.gethostname(), where_pids_count(), os.getpid(), "" if found is None else found.start)


def process_identity(pid: int) -> str:
    """``pid.start``: names a process for ever, although pids are used again. "" when there is none, or a zombie."""
    found = _stat(pid)
    return "" if found is None else f"{pid}.{found.start}"


def where_pids_count() -> str:
    """``boot.namespace``: processes that have this in common see each other's pids. "" where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def condition(pid: int, start: str = "") -> str:
    """``alive``, ``stopped`` (by a signal, or held by a debugger) or ``dead``; ``start`` "": whatever has that pid."""
    found = _stat(pid)
    if found is None or found.exiting or (start and found.start != start):
        return DEAD
    return STOPPED if found.stopped else ALIVE


def _stat(pid: int) -> _Stat | None:
    try:
        # The command's name is in parentheses and may hold anything; the rest is plain words.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if words[0] in {b"Z", b"X"}:
        return None
    return _Stat(words[0] in {b"T", b"t"}, bool(int(words[6]) & _EXITING), words[19].decode())
