"""One of several processes that race for the same keys; started by StoreTests.

``python -m ckpt.testing.racing URL ROUNDS NBYTES WAY`` prints ``ready``, waits for a line, then tries to make the
objects ``race/000``, ``race/001``, … filled with its pid, by ``create`` or by a ``sink``, and prints the rounds that
it won as JSON.
"""

from __future__ import annotations

import json
import os
import sys

from ckpt.errors import AlreadyExistsError
from ckpt.store import Store, open_store


def key(number: int) -> str:
    """The object that round ``number`` is about."""
    return f"race/{number:03}"


def payload(who: int, nbytes: int) -> bytes:
    """Bytes that tell their writer, and whether they are whole."""
    return (f"{who:016}".encode() * (nbytes // 16 + 1))[:nbytes]


def compete(store: Store, number: int, data: bytes, way: str) -> bool:
    """Try to make one object; whether it was won."""
    try:
        if way == "create":
            store.create(key(number), data)
        else:
            with store.open_sink(key(number), len(data)) as sink:
                sink.write(data)
    except AlreadyExistsError:
        return False
    return True


def main(url: str, rounds: int, nbytes: int, way: str) -> None:
    """What the started process does."""
    store, data = open_store(url), payload(os.getpid(), nbytes)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    won = [number for number in range(rounds) if compete(store, number, data, way)]
    sys.stdout.write(json.dumps(won) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
