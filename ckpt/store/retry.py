"""What a network storage may fail with for a moment, and calls that are made again until it has passed."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

RETRY_TIMEOUT_S = 60.0
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 5.0

_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,  # what s3fs makes of SlowDown
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EINTR,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
}
_STATUSES = {408, 425, 429, 500, 502, 503, 504}  # of HTTP


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later: time-outs, broken connections, EAGAIN, busy servers."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    return any(_status(where) in _STATUSES for where in (error, getattr(error, "response", None)))


def _status(thing: object) -> int | None:
    for name in ("status", "status_code", "code"):
        value = getattr(thing, name, None)
        if isinstance(value, int):
            return value
    return None


def retry(call: Callable[[], T], timeout_s: float, again: Callable[[BaseException], bool] = is_transient) -> T:
    """What ``call`` gives; it is called again after errors that ``again`` lets pass, for ``timeout_s`` seconds.

    Waits 0.05 s, then twice as long each time, up to 5 s. Raises the last error as it came.
    """
    deadline, wait_s = time.monotonic() + timeout_s, _FIRST_WAIT_S
    while True:
        try:
            return call()
        except Exception as error:
            if not again(error) or time.monotonic() + wait_s > deadline:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
