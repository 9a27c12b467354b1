"""``python -m ckpt.keeper --fd N --folder F --key K --job J``: started by a trainer, never by hand."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from ckpt.keeper import log
from ckpt.keeper.place import Place
from ckpt.keeper.process import LINGER_S, Keeper
from ckpt.keeper.start import SECRET_NBYTES


def main() -> int:
    """Serve on the inherited, listening socket until the job is done."""
    parser = argparse.ArgumentParser(prog="python -m ckpt.keeper", description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--job", default="")
    arguments = parser.parse_args()
    place = Place(folder=arguments.folder, key=arguments.key, job=arguments.job)
    listener = socket.socket(fileno=arguments.fd)
    os.set_inheritable(arguments.fd, False)
    with open(place.path("secret"), "rb") as file:
        secret = file.read(SECRET_NBYTES)
    linger_s = _linger_s()
    log.say(f"keeper {os.getpid()} of {place.job}, started by process {os.getppid()}")
    try:
        Keeper(listener, place, secret, linger_s).serve()
    except Exception:  # noqa: BLE001 - the clients see the socket close; the reason must be somewhere
        log.unexpected("keeper")
        return 1
    return 0


def _linger_s() -> float:
    text = os.environ.get("CKPT_LINGER_S", "")
    try:
        return max(0.0, float(text)) if text else LINGER_S
    except ValueError:
        log.problem(f"CKPT_LINGER_S={text!r} is no number of seconds; taking {LINGER_S:g}")
        return LINGER_S


if __name__ == "__main__":
    sys.exit(main())
