"""How much memory arenas may take: what the node still has, what every cgroup leaves, and what the budget allows."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ckpt.errors import BadInputError, KeeperError
from ckpt.keeper.mapping import HUGE_PAGE_NBYTES

_NO_LIMIT_NBYTES = 1 << 63
# Over memory.high the kernel kills nobody, but slows every process of the group down until the group is below it
# again; memory that is shared and cannot be swapped out never gets it there. So it is a limit like the others.
_LIMITS = {2: ("memory.max", "memory.high"), 1: ("memory.limit_in_bytes",)}
_USAGE = {2: "memory.current", 1: "memory.usage_in_bytes"}
_STAT_PREFIX = {2: "", 1: "total_"}  # version 1 counts a group's own pages apart from those of the groups below it


class Available(msgspec.Struct, frozen=True):
    """Memory that can still be had, and what sets that limit, for people."""

    nbytes: int
    by: str


def arena_nbytes(nbytes: int) -> int:
    """What the arena for a snapshot of ``nbytes`` takes: whole huge pages."""
    return max(1, -(-nbytes // HUGE_PAGE_NBYTES)) * HUGE_PAGE_NBYTES


def available_nbytes(proc: str = "/proc") -> Available:
    """The least of MemAvailable and what each cgroup above this process leaves, version 1 or 2.

    In a container only the groups that are mounted there are seen. ``proc`` is where the kernel's files about
    this process are.
    """
    found = [Available(_NO_LIMIT_NBYTES, "no limit is known"), *_of_node(proc)]
    for version, folder in _groups(proc):
        found += _of_group(version, folder)
    return min(found, key=lambda available: available.nbytes)


def check_room(nbytes: int, what: str) -> None:
    """BadInputError when ``what`` takes more memory than can be had: said before it is asked for.

    A checkpoint from elsewhere may claim tensors of any size.
    """
    available = available_nbytes()
    if nbytes > available.nbytes:
        raise BadInputError(
            f"{what}: {nbytes:,} bytes, {available.nbytes:,} are available ({available.by}); read it where there is "
            "more memory, or load it into a sharded state"
        )


def check_budget(
    needed_nbytes: int,
    budget_bytes: int | None,
    what: str,
    *,
    snapshots: int = 2,
    held_nbytes: int = 0,
    promised_nbytes: int = 0,
    proc: str = "/proc",
) -> None:
    """Refuse arenas that ``what`` would need, of ``needed_nbytes`` in all (sums of ``arena_nbytes``).

    Raises KeeperError, in one sentence, when ``budget_bytes`` allows less, or when what they take beyond the
    ``held_nbytes`` that they have already cannot be had. ``promised_nbytes`` are spoken for by others, who have not
    touched them yet.
    """
    ways = ["take snapshots=1"] if snapshots > 1 else []
    ways += ["run fewer ranks on a node", "save less"]
    if budget_bytes is not None and needed_nbytes > budget_bytes:
        raise KeeperError(
            f"no memory for {what}: it needs arenas of {needed_nbytes:,} bytes in all on this node, "
            f"budget_bytes allows {budget_bytes:,}; {', '.join(ways)}, or raise budget_bytes"
        )
    more = needed_nbytes - held_nbytes
    if more <= 0:
        return
    available = available_nbytes(proc)
    left = max(0, available.nbytes - promised_nbytes)
    if more > left:
        promised = f", less {promised_nbytes:,} that are lent and not touched yet" if promised_nbytes else ""
        raise KeeperError(
            f"no memory for {what}: it needs {more:,} bytes more, {left:,} are available ({available.by}{promised}); "
            f"{', '.join(ways)}, or give the job more memory"
        )


def _of_node(proc: str) -> list[Available]:
    """What the kernel thinks can be had without swapping."""
    nbytes = _number(_read(f"{proc}/meminfo"), "MemAvailable:")
    return [] if nbytes is None else [Available(nbytes * 1024, "MemAvailable of the node")]


def _of_group(version: int, folder: str) -> list[Available]:
    """One cgroup: each of its limits, less what it uses and the kernel cannot take back."""
    usage = _whole(_read(f"{folder}/{_USAGE[version]}"))
    if usage is None:  # the root, or a hierarchy without the memory controller
        return []
    stat = _read(f"{folder}/memory.stat")
    limits = [(f"{folder}/{name}", _whole(_read(f"{folder}/{name}"))) for name in _LIMITS[version]]
    # Version 1 also tells the least limit of all groups above, be they visible or not.
    limits.append((f"hierarchical_memory_limit in {folder}/memory.stat", _number(stat, "hierarchical_memory_limit")))
    used = usage - _reclaimable(stat, _STAT_PREFIX[version])
    return [
        Available(max(0, limit - used), f"{name} is {limit:,}") for name, limit in limits if limit is not None
    ]  # "max" is no limit


def _reclaimable(stat: str, prefix: str) -> int:
    """Page cache that goes when memory is asked for. Arenas are not in it: shared memory counts as anonymous.

    All that is not in use and, as in the kernel's own estimate for a node, half of what is: a trainer that maps its
    data set keeps gigabytes of it active, which the kernel would take before it kills.
    """
    inactive, active = (_number(stat, f"{prefix}{kind}_file") or 0 for kind in ("inactive", "active"))
    return inactive + active // 2


def _groups(proc: str) -> Iterator[tuple[int, str]]:
    """(version, folder) of this process's memory cgroups, each hierarchy from its own group up."""
    paths = dict(_paths(proc))
    for version, root, point in _mounts(proc):
        if version not in paths:
            continue
        path = paths[version]
        below = path.removeprefix(root.rstrip("/")) if path == root or path.startswith(root.rstrip("/") + "/") else ""
        # Outside of what is mounted here (another namespace's names): what is mounted is then what holds us.
        folder = point if ".." in below.split("/") else (point + below).rstrip("/")
        while True:
            yield version, folder
            if len(folder) <= len(point):
                break
            folder = os.path.dirname(folder)


def _paths(proc: str) -> Iterator[tuple[int, str]]:
    """(version, path within its hierarchy) of this process's groups that may count memory."""
    for line in _read(f"{proc}/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif "memory" in controllers.split(","):
            yield 1, path


def _mounts(proc: str) -> Iterator[tuple[int, str, str]]:
    """(version, path of the group that is mounted, folder) of every cgroup file system that may count memory."""
    for line in _read(f"{proc}/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        words, kinds = before.split(" "), after.split(" ")
        if len(words) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            version = 2
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            version = 1
        else:
            continue
        yield version, _unescaped(words[3]), _unescaped(words[4])


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _read(path: str) -> str:
    """A small file of the kernel's; "" when there is none, or it may not be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="surrogateescape")
    return ""


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _number(text: str, name: str) -> int | None:
    """The number on the line that begins with the word ``name``."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return _whole(words[1])
    return None
