"""The memory itself: sealed, shared, aligned, not inherited, given back; and how many arenas there may be."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
from pathlib import Path

import pytest

from ckpt.errors import CkptError, KeeperError
from ckpt.keeper.arenas import FREE, GRANTED, Arena, ArenaPool, Wanted
from ckpt.keeper.mapping import Mapping


def flags_of(view: memoryview) -> str | None:
    """The kernel's flags of the mapping that begins with the view."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    text = Path("/proc/self/smaps").read_text()
    start = text.find(f"{address:x}-")
    return text[start:].partition("VmFlags")[2].splitlines()[0] if start >= 0 else None


def test_an_arena_is_sealed():
    """Nobody can shrink it under a process that has it mapped, nor unseal it; it can grow."""
    arena = Arena(1, "run", 0)
    arena.grow(100)
    assert arena.nbytes == 2 << 20
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    arena.grow((2 << 20) + 1)
    assert (arena.nbytes, len(arena.view)) == (4 << 20, 4 << 20)
    assert arena.view.readonly
    arena.close()


def test_what_the_trainer_writes_the_keeper_reads():
    """Both map the same memory, where huge pages can be; forks do not inherit it and core dumps do not hold it."""
    arena = Arena(1, "run", 0)
    arena.grow(100)
    mapping = Mapping(arena.fd, arena.nbytes)
    mapping.touch(10_000)
    mapping.view[4096:4099] = b"abc"
    assert bytes(arena.view[4096:4099]) == b"abc"
    assert ctypes.addressof(ctypes.c_char.from_buffer(mapping.view)) % (2 << 20) == 0
    assert {"dc", "dd"} <= set((flags_of(mapping.view) or "").split()), "VM_DONTCOPY, VM_DONTDUMP"
    arena.close()


def test_a_mapping_lives_as_long_as_its_last_view():
    """A view that somebody still holds stays readable; then the memory goes."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(1, "run", 0)
    arena.grow(100)
    mapping = Mapping(arena.fd, arena.nbytes)
    part = mapping.view[10:20]
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping.view))
    arena.close()
    del mapping, arena
    gc.collect()
    assert bytes(part) == bytes(10)
    del part
    gc.collect()
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_cannot_be_had():
    """More than the address space gives an error and no crash."""
    fd = os.memfd_create("test")
    with pytest.raises(KeeperError, match="cannot be mapped"):
        Mapping(fd, 1 << 60)
    os.close(fd)


def test_a_mapping_that_fails_leaves_no_hole():
    """The address space that was reserved for it is given back."""
    before = Path("/proc/self/maps").read_text().count("\n")
    for _ in range(5):
        with pytest.raises(KeeperError, match="cannot be mapped: Bad file descriptor"):
            Mapping(1 << 20, 2 << 20)
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 1


def test_touching_can_be_stopped():
    """What was touched until then counts, and the rest can follow."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 64 << 20)
    mapping = Mapping(fd, 64 << 20)
    mapping.touch(64 << 20, lambda: mapping.touched >= 32 << 20)
    assert mapping.touched == 32 << 20
    assert os.fstat(fd).st_blocks * 512 == 32 << 20
    mapping.touch(64 << 20)
    assert os.fstat(fd).st_blocks * 512 == 64 << 20
    os.close(fd)


class Desk:
    """Notes what a pool answers."""

    def __init__(self, in_use: set[tuple[str, int]] | None = None, proc: str = "/proc") -> None:
        self.granted: list[tuple[Wanted, Arena]] = []
        self.refused: list[Wanted] = []
        self.errors: list[str] = []
        self.in_use = in_use
        self.pool = ArenaPool(lambda w, a: self.granted.append((w, a)), self.refuse, self.is_used, proc)

    def refuse(self, wanted: Wanted, error: CkptError) -> None:
        self.refused.append(wanted)
        self.errors.append(str(error))

    def is_used(self, run: str, rank: int) -> bool:
        return self.in_use is None or (run, rank) in self.in_use

    def close(self) -> None:
        for arena in {arena.number: arena for _, arena in self.granted}.values():
            arena.close()


def test_a_pool_lends_two_arenas_per_rank_and_run():
    """Requests beyond that wait in order, and are served as arenas become free, the longest unused first."""
    desk = Desk()
    for request in range(4):
        desk.pool.request("run", 0, Wanted(1, request, 100))
    desk.pool.request("run", 1, Wanted(2, 9, 100))
    desk.pool.request("other", 0, Wanted(1, 10, 100))
    assert [w.request for w, _ in desk.granted] == [0, 1, 9, 10]
    second, first = desk.granted[1][1], desk.granted[0][1]
    first.filled = second.filled = True
    desk.pool.free(second)
    desk.pool.free(first)
    assert [(w.request, a) for w, a in desk.granted[4:]] == [(2, second), (3, first)]
    desk.pool.free(first)
    desk.pool.free(second)
    desk.pool.request("run", 0, Wanted(1, 11, 100))
    assert desk.granted[-1][1] is second
    for arena in {a.number: a for _, a in desk.granted}.values():
        arena.close()


def test_a_pool_forgets_a_client_that_is_gone():
    """Its requests are dropped, its unstaged arenas go to the next; staged ones stay busy."""
    desk = Desk()
    for request in range(3):
        desk.pool.request("run", 0, Wanted(1, request, 100))
    desk.granted[0][1].state = "staged"
    desk.pool.request("run", 0, Wanted(2, 7, 100))
    desk.pool.drop_holder(1)
    assert [w.request for w, _ in desk.granted] == [0, 1, 7]
    assert [a.state for _, a in desk.granted] == ["staged", GRANTED, GRANTED]
    desk.pool.free(desk.granted[0][1])
    assert desk.granted[0][1].state == FREE
    desk.pool.drop_ranks([0])
    assert [status.arena for status in desk.pool.status()] == [desk.granted[2][1].number]
    desk.granted[2][1].close()


def test_a_pool_does_not_wait_for_a_store_that_hangs():
    """Once all arenas of a rank are stuck in failed saves, requests are refused; one that comes free is lent again."""
    desk = Desk()
    for request in range(3):
        desk.pool.request("run", 0, Wanted(1, request, 100))
    (_, first), (_, second) = desk.granted
    desk.pool.stick(first)
    assert desk.refused == []
    desk.pool.stick(second)
    desk.pool.request("run", 0, Wanted(1, 3, 100))
    assert [w.request for w in desk.refused] == [2, 3]
    desk.pool.free(second)
    desk.pool.request("run", 0, Wanted(1, 4, 100))
    assert desk.granted[2][1] is second
    for arena in (first, second):
        arena.close()


def test_a_pool_refuses_what_the_node_has_not():
    """The next request is served, and the refused one holds nothing."""
    desk = Desk()
    desk.pool.request("run", 0, Wanted(1, 1, 1 << 50))
    assert [w.request for w in desk.refused] == [1]
    assert desk.pool.status() == ()
    desk.pool.request("run", 0, Wanted(1, 2, 100))
    assert [w.request for w, _ in desk.granted] == [2]
    desk.granted[0][1].close()


MIB = 1 << 20


def test_an_arena_that_holds_no_snapshot_is_lent_first():
    """Its rank has touched it already; the other one may hold the newest whole snapshot."""
    desk = Desk()
    desk.pool.request("run", 0, Wanted(1, 1, 100))
    first = desk.granted[0][1]
    desk.pool.free(first)
    desk.pool.request("run", 0, Wanted(1, 2, 100))
    assert desk.granted[1][1] is first, "none was filled: no reason for another one"
    first.filled = True
    desk.pool.free(first)
    desk.pool.request("run", 0, Wanted(1, 3, 100))
    second = desk.granted[2][1]
    assert second is not first
    desk.pool.free(second)
    desk.pool.request("run", 0, Wanted(1, 4, 100))
    assert desk.granted[3][1] is second
    desk.close()


def test_one_snapshot_is_one_arena():
    """With ``snapshots=1`` a rank has one arena, and the next request waits for it."""
    desk = Desk()
    for request in (1, 2):
        desk.pool.request("run", 0, Wanted(1, request, 100, snapshots=1))
    desk.pool.request("run", 1, Wanted(2, 3, 100, snapshots=1))
    assert [w.request for w, _ in desk.granted] == [1, 3]
    desk.pool.free(desk.granted[0][1])
    assert [w.request for w, _ in desk.granted] == [1, 3, 2]
    assert len(desk.pool.status()) == 2
    desk.close()


def test_from_two_snapshots_to_one_and_back():
    """The arena that is free first goes at once, the other one is lent from then on; two come back on request."""
    desk = Desk()
    for request in (1, 2):
        desk.pool.request("run", 0, Wanted(1, request, 100))
    (_, first), (_, second) = desk.granted
    desk.pool.request("run", 0, Wanted(1, 3, 100, snapshots=1))
    desk.pool.free(second)
    assert (desk.pool.numbers("run", 0), second.fd, len(desk.granted)) == ((first.number,), -1, 2)
    desk.pool.free(first)
    assert desk.granted[2][1] is first
    first.filled = True
    desk.pool.request("run", 0, Wanted(1, 4, 100))
    assert len(desk.granted) == 4
    desk.pool.free(first)
    desk.pool.request("run", 0, Wanted(1, 5, 100, snapshots=1))
    assert len(desk.pool.numbers("run", 0)) == 1
    assert len(desk.granted) == 4, "the one that is left is not free yet"
    desk.close()


def test_one_snapshot_with_a_store_that_hangs():
    """A stuck arena does not count as the one, unless it is the only one."""
    desk = Desk()
    for request in (1, 2):
        desk.pool.request("run", 0, Wanted(1, request, 100))
    (_, first), (_, second) = desk.granted
    desk.pool.stick(first)
    desk.pool.free(second)
    desk.pool.request("run", 0, Wanted(1, 3, 100, snapshots=1))
    assert desk.granted[2][1] is second
    desk.pool.free(first)
    assert desk.pool.numbers("run", 0) == (second.number,)
    desk.pool.stick(second)
    desk.pool.request("run", 0, Wanted(1, 4, 100, snapshots=1))
    assert [w.request for w in desk.refused] == [4]
    desk.close()


@pytest.mark.parametrize("snapshots", [0, 3, -1])
def test_other_numbers_of_snapshots(snapshots: int):
    """Refused in words."""
    desk = Desk()
    desk.pool.request("run", 0, Wanted(1, 1, 100, snapshots=snapshots))
    assert desk.errors == [f"snapshots={snapshots}: a rank has 1 or 2 arenas of a run"]


def test_a_budget_is_for_all_ranks_of_a_run():
    """The third arena of a run that may have two is refused, whoever wants it; another run has its own budget."""
    desk = Desk()
    desk.pool.request("run", 0, Wanted(1, 1, 2 * MIB, budget_bytes=4 * MIB))
    desk.pool.request("run", 1, Wanted(2, 2, MIB, budget_bytes=4 * MIB))
    desk.pool.request("run", 1, Wanted(2, 3, 1, budget_bytes=4 * MIB))
    desk.pool.request("other", 0, Wanted(1, 4, MIB, budget_bytes=4 * MIB))
    assert [w.request for w, _ in desk.granted] == [1, 2, 4]
    assert desk.errors == [
        (
            "no memory for the snapshot of rank 1: it needs arenas of 6,291,456 bytes in all on this node, "
            "budget_bytes allows 4,194,304; take snapshots=1, run fewer ranks on a node, save less, "
            "or raise budget_bytes"
        )
    ]
    assert [(r.run, r.nbytes, r.snapshots, r.budget_bytes) for r in desk.pool.runs()] == [
        ("run", 4 * MIB, 2, 4 * MIB), ("other", 2 * MIB, 2, 4 * MIB),
    ]  # fmt: skip
    desk.pool.free(desk.granted[0][1])
    desk.pool.request("run", 0, Wanted(1, 5, MIB, budget_bytes=2 * MIB))
    assert [w.request for w in desk.refused] == [3, 5], "a budget that was lowered counts for what there is already"
    desk.close()


def test_what_is_lent_and_not_touched_counts(tmp_path: Path):
    """Two ranks that ask at once cannot both have what is there for one."""
    (tmp_path / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable:   6144 kB\n")
    desk = Desk(proc=str(tmp_path))
    desk.pool.request("run", 0, Wanted(1, 1, 4 * MIB))
    desk.pool.request("run", 1, Wanted(2, 2, 4 * MIB, snapshots=1))
    assert desk.errors == [
        (
            "no memory for the snapshot of rank 1: it needs 4,194,304 bytes more, 2,097,152 are available "
            "(MemAvailable of the node, less 4,194,304 that are lent and not touched yet); "
            "run fewer ranks on a node, save less, or give the job more memory"
        )
    ]
    Mapping(desk.granted[0][1].fd, 4 * MIB).touch(4 * MIB)
    desk.pool.request("run", 1, Wanted(2, 3, 4 * MIB))
    assert [w.request for w, _ in desk.granted] == [1, 3], "what is touched the kernel knows of"
    desk.close()


def test_memory_of_ranks_that_did_not_come_back(tmp_path: Path):
    """A job that restarts with other ranks gets the memory of those that nobody asks for any more."""
    desk = Desk(in_use={("run", 0)})
    desk.pool.request("run", 7, Wanted(1, 1, 4 * MIB, budget_bytes=4 * MIB))
    desk.pool.request("run", 0, Wanted(2, 2, 2 * MIB, budget_bytes=4 * MIB))
    assert [w.request for w in desk.refused] == [2], "it is lent"
    desk.pool.free(desk.granted[0][1])
    desk.pool.request("run", 0, Wanted(2, 3, 2 * MIB, budget_bytes=4 * MIB))
    assert [(a.rank, a.nbytes) for a in desk.pool.status()] == [(0, 2 * MIB)]
    desk.close()
