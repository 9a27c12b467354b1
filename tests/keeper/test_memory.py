"""The memory itself: sealed, shared, aligned, not inherited, given back."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
from pathlib import Path

import pytest

from ckpt.errors import KeeperError
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
    """Both map the same memory; the trainer's view is page-aligned, and flagged not to be inherited by forks."""
    arena = Arena(1, "run", 0)
    arena.grow(100)
    mapping = Mapping(arena.fd, arena.nbytes)
    mapping.touch(10_000)
    mapping.view[4096:4099] = b"abc"
    assert bytes(arena.view[4096:4099]) == b"abc"
    assert ctypes.addressof(ctypes.c_char.from_buffer(mapping.view)) % 4096 == 0
    assert " dc " in (flags_of(mapping.view) or ""), "VM_DONTCOPY"
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


class Desk:
    """Notes what a pool answers."""

    def __init__(self) -> None:
        self.granted: list[tuple[Wanted, Arena]] = []
        self.refused: list[Wanted] = []
        self.pool = ArenaPool(lambda w, a: self.granted.append((w, a)), lambda w, _: self.refused.append(w))


def test_a_pool_lends_two_arenas_per_rank_and_run():
    """Requests beyond that wait in order, and are served as arenas become free, the longest unused first."""
    desk = Desk()
    for request in range(4):
        desk.pool.request("run", 0, Wanted(1, request, 100))
    desk.pool.request("run", 1, Wanted(2, 9, 100))
    desk.pool.request("other", 0, Wanted(1, 10, 100))
    assert [w.request for w, _ in desk.granted] == [0, 1, 9, 10]
    second, first = desk.granted[1][1], desk.granted[0][1]
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


def test_a_pool_refuses_what_the_node_has_not(monkeypatch: pytest.MonkeyPatch):
    """The next request is served, and the refused one holds nothing."""
    desk = Desk()
    desk.pool.request("run", 0, Wanted(1, 1, 1 << 50))
    assert [w.request for w in desk.refused] == [1]
    assert desk.pool.status() == ()
    desk.pool.request("run", 0, Wanted(1, 2, 100))
    assert [w.request for w, _ in desk.granted] == [2]
    desk.granted[0][1].close()
