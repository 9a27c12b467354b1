"""Asking keepers: what each is doing, and whether one still has a save of a run under way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec

from ckpt.errors import KeeperError
from ckpt.keeper import protocol
from ckpt.keeper.place import Place, all_places
from ckpt.keeper.saves import name_ranks
from ckpt.keeper.start import ATTACH_TIMEOUT_S, Link, attach, living_pid

POLL_S = 0.05


class Silent(msgspec.Struct, frozen=True):
    """A keeper that lives and does not answer: it is stopped, or speaks another version's protocol."""

    pid: int
    log: str


def statuses() -> list[protocol.Status]:
    """What every keeper of this user on this node is doing. One that ends meanwhile, or is silent, is left out."""
    return [found for found in keepers() if isinstance(found, protocol.Status)]


def keepers() -> list[protocol.Status | Silent]:
    """The same, and which keepers are silent."""
    found: list[protocol.Status | Silent] = []
    for place in all_places():
        link = attach(place)
        status = None
        if link is not None:
            with link.socket:
                status = _ask(link)
        if status is not None:
            found.append(status)
        elif (pid := living_pid(place)) is not None:
            found.append(Silent(pid, place.path("log")))
    return found


def answers(place: Place) -> bool:
    """Whether the keeper of a place answers a question, or is gone."""
    link = attach(place)
    if link is None:
        return living_pid(place) is None
    with link.socket:
        return _ask(link) is not None or living_pid(place) is None


def settle(run_url: str, timeout_s: float) -> list[str]:
    """Wait until no keeper of this user on this node has a save of the run under way; what still is, in sentences.

    Called before a run is opened: what an earlier job has staged is worth a bounded wait.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(_closing(link)) for place in all_places() if (link := attach(place)) is not None]
        while True:
            answers = [(link, status) for link in links if (status := _ask(link)) is not None]
            links = [link for link, status in answers if any(save.run == run_url for save in status.saves)]
            if not links or time.monotonic() >= deadline:
                return [
                    _describe(status, save) for _, status in answers for save in status.saves if save.run == run_url
                ]
            time.sleep(POLL_S)


@contextlib.contextmanager
def _closing(link: Link) -> Iterator[Link]:
    with link.socket:
        yield link


def _ask(link: Link) -> protocol.Status | None:
    """One keeper's status; None when it has gone."""
    link.socket.settimeout(ATTACH_TIMEOUT_S)
    try:
        link.socket.sendall(protocol.pack(protocol.StatusRequest(1)))
        while (frame := link.frames.frame()) is None:
            received = link.socket.recv(1 << 20)
            if not received:
                return None
            link.frames.feed(received)
        message = protocol.from_keeper.decode(frame)
    except (OSError, KeeperError, msgspec.DecodeError):
        return None
    return message if isinstance(message, protocol.Status) else None


def _describe(status: protocol.Status, save: protocol.SaveStatus) -> str:
    written = sum(rank.nbytes_written for rank in save.ranks)
    whole = sum(rank.nbytes for rank in save.ranks)
    waiting = f"waits for {name_ranks(save.missing)}" if save.missing else "all parts are durable, no COMMIT yet"
    if save.failure:
        waiting = f"is being removed: {save.failure}"
    return (
        f"step {save.step} ({save.attempt}) in keeper {status.pid} of {status.job}: "
        f"{written:,} of {whole:,} bytes written here; {waiting}"
    )
