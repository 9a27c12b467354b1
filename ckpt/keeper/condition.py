"""How a process of this node fares: whether it lives, is stopped, or is dead. No torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from ckpt.holds import where_pids_count

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


def this_process() -> ProcessName:
    """The process that asks."""
    return ProcessName(socket.gethostname(), where_pids_count(), os.getpid(), _stat(os.getpid())[1])


def condition(pid: int, start: str = "") -> str:
    """``alive``, ``stopped`` (by a signal, or held by a debugger) or ``dead``; ``start`` "": whatever has that pid."""
    state, found = _stat(pid)
    if state == DEAD or (start and found != start):
        return DEAD
    return state


def _stat(pid: int) -> tuple[str, str]:
    try:
        # The command's name is in parentheses and may hold anything; the rest is plain words.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return DEAD, ""
    if words[0] in {b"Z", b"X"} or int(words[6]) & _EXITING:
        return DEAD, ""
    return STOPPED if words[0] in {b"T", b"t"} else ALIVE, words[19].decode()
