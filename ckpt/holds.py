"""Holds in a store: taken by readers for as long as they read an attempt, respected by whoever deletes.

The order closes the race: a reader creates its hold, and then reads COMMIT; who deletes looks for holds, deletes
COMMIT, and looks for holds again before it touches anything else. So a reader that has seen COMMIT behind its hold is
seen by whoever deletes, and reads to its end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from ckpt.errors import BadInputError, DamagedError, NotFoundError, StoreError, UnsupportedFormatError
from ckpt.format import records
from ckpt.format.commit import Attempt
from ckpt.format.hold import HOLD_LIMIT_NBYTES, HOLDS, Hold, decode_hold, encode_hold, hold_key, parse_hold_name
from ckpt.processes import process_identity, where_pids_count
from ckpt.store.base import Store

HOLD_S = 900.0  # how long a hold is believed that is not renewed; half of it is what two hosts' clocks may differ by


@contextlib.contextmanager
def holding(store: Store, attempt: Attempt, hold_s: float | None = None) -> Iterator[None]:
    """Hold an attempt while the block runs, however long that takes.

    A store that refuses the record (read-only, no rights, full) is read without one: a hold only keeps others from
    deleting, and what they delete too early is missed, never misread.
    """
    held = _Holding(store, attempt, HOLD_S if hold_s is None else hold_s)
    try:
        yield
    finally:
        held.release()


class _Holding:
    """One record at a time, each followed by the next when half of its time is over."""

    def __init__(self, store: Store, attempt: Attempt, hold_s: float) -> None:
        self._store, self._attempt, self._hold_s = store, attempt, hold_s
        self._lock = threading.Lock()
        self._released = False
        self._timer: threading.Timer | None = None
        self._key = self._create()
        self._wait()

    def release(self) -> None:
        with self._lock:
            self._released = True
            if self._timer is not None:
                self._timer.cancel()
            self._delete(self._key)

    def _create(self) -> str | None:
        now, pid = time.time(), os.getpid()
        place, process = where_pids_count(), process_identity(pid)
        hold = Hold(
            format=records.FORMAT,
            folder=self._attempt.folder,
            host=socket.gethostname(),
            pid=pid,
            process=f"{place}.{process}" if place and process else "",
            created_unix_s=now,
            until_unix_s=now + self._hold_s,
        )
        key = hold_key(self._attempt.folder, secrets.token_hex(8))
        try:
            self._store.create(key, encode_hold(hold))
        except (StoreError, BadInputError):  # BadInputError: a clock that no calendar has
            return None
        return key

    def _wait(self) -> None:
        if self._key is not None:
            self._timer = threading.Timer(self._hold_s / 2, self._renew)
            self._timer.daemon = True
            self._timer.start()

    def _renew(self) -> None:
        with self._lock:
            if self._released:
                return
            before, after = self._key, self._create()
            if after is not None:
                self._key = after
                self._delete(before)
            self._wait()

    def _delete(self, key: str | None) -> None:
        if key is not None:
            with contextlib.suppress(StoreError):  # it becomes void by itself
                self._store.delete(key)


def look(store: Store, now_unix_s: float | None = None) -> tuple[dict[Attempt, Hold], list[str]]:
    """(attempt -> the hold on it that lasts longest, keys of holds that are void). StoreError.

    Void are those whose time is over, whose process is gone as far as this host can tell, and those that cannot be
    read. One in a format of a later version counts: who wrote it knows why.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    here = where_pids_count()
    held: dict[Attempt, Hold] = {}
    void: list[str] = []
    for name in store.list(HOLDS):
        attempt = parse_hold_name(name)
        if attempt is None:
            continue
        key = f"{HOLDS}/{name}"
        try:
            hold = decode_hold(store.get(key, limit_nbytes=HOLD_LIMIT_NBYTES), f"{store.url}/{key}")
        except NotFoundError:
            continue  # let go just now
        except DamagedError:
            void.append(key)
            continue
        except UnsupportedFormatError:
            hold = Hold(records.FORMAT, attempt.folder, "a later version's", 0, "", now, now + HOLD_S)
        if hold.folder != attempt.folder or now >= hold.until_unix_s or _is_gone(hold, here):
            void.append(key)
        elif attempt not in held or held[attempt].until_unix_s < hold.until_unix_s:
            held[attempt] = hold
    return held, void


def _is_gone(hold: Hold, here: str) -> bool:
    """Whether the holder is known to have ended: told only of processes whose pids count here."""
    place, _, started = hold.process.rpartition(f".{hold.pid}.")
    return bool(here) and place == here and process_identity(hold.pid) != f"{hold.pid}.{started}"


def describe(hold: Hold) -> str:
    """``a reader holds it: pid 4711 on node-3, until 12:31:09 UTC at the latest``."""
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(hold.until_unix_s))
    return f"a reader holds it: pid {hold.pid} on {hold.host}, until {until} at the latest"
