"""The keeper's log: lines on standard error, which is a small file beside its socket."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback

LIMIT_NBYTES = 1 << 20

_problems = 0


def say(text: str) -> None:
    """One line with the time. Never raises: a full disk must not stop a save."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
    with contextlib.suppress(OSError, ValueError):
        fd = sys.stderr.fileno()
        if os.fstat(fd).st_size > LIMIT_NBYTES:
            os.ftruncate(fd, 0)
            line = f"(earlier lines were dropped at {LIMIT_NBYTES} bytes)\n{line}"
        os.write(fd, line.encode(errors="backslashreplace"))


def problem(text: str) -> None:
    """A line about something that went wrong; a log with one in it is kept when the keeper ends."""
    global _problems  # noqa: PLW0603 - one process, one log
    _problems += 1
    say(text)


def unexpected(where: str) -> None:
    """The traceback of the exception that is being handled."""
    problem(f"{where}: unexpected:\n{traceback.format_exc()}")


def worth_keeping() -> bool:
    """Whether a problem was reported."""
    return _problems > 0
