"""A trainer process without torch, for tests to drive and to kill: JSON commands in, JSON answers out, line by line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ckpt.errors import CkptError
from ckpt.format import records
from ckpt.format.commit import Attempt
from ckpt.format.layout import Layout, Mesh, Tensor, encode_layout
from ckpt.format.part import data_name
from ckpt.format.safetensors import HeaderEntry, build_header
from ckpt.format.values import values_digest
from ckpt.keeper.client import ArenaView, KeeperClient, PendingTask
from ckpt.keeper.protocol import FileTask, LayoutTask, SaveTask
from ckpt.plan.boxes import LayoutBoxes
from ckpt.plan.files import Entry, file_tables
from ckpt.plan.retention import KeepPolicy


def layout_of(world: int, nbytes: int) -> Layout:
    """One uint8 tensor, ``nbytes`` on each rank."""
    mesh = Mesh(shape=(world,), ranks=tuple(range(world)))
    tensor = Tensor("model.w", "model", "uint8", (world * nbytes,), 0, ("S0",), (0,))
    return Layout(records.FORMAT, (mesh,), (tensor,), {})


def payload(step: int, rank: int, nbytes: int) -> bytes:
    """What a rank holds at a step."""
    return bytes([(step * 31 + rank * 7 + 1) % 256]) * nbytes


def entries_of(layout: Layout, rank: int) -> list[Entry]:
    """The shards of a rank's model file."""
    return file_tables(layout, rank, boxes=LayoutBoxes(layout))["model"]


def stage(client: KeeperClient, run: str, step: int, save: int, **options: Any) -> PendingTask:
    """Fill an arena and hand it over; ``options`` are this module's and SaveTask's own."""
    return hand_over(client, fill(client, run, step, save, **options)[1])


def hand_over(client: KeeperClient, task: SaveTask) -> PendingTask:
    """Of an arena that is filled already, one watermark tells all."""
    pending = client.begin(task)
    pending.ready(pending.end)
    return pending


def fill(
    client: KeeperClient, run: str, step: int, save: int, *, world: int = 1, nbytes: int = 10_000,
    writer: int = 1, encode: str = "raw", digests: dict[str, str] | None = None, arena_run: str | None = None,
    snapshots: int = 2, budget_bytes: int | None = None, keep_last: int | None = None, keep_every: int | None = None,
    **task: Any,
) -> tuple[ArenaView, SaveTask]:  # fmt: skip
    """Fill an arena with this rank's payload; the task that would persist it."""
    rank = client.rank
    layout = layout_of(world, nbytes)
    digest, raw = encode_layout(layout)
    entries = entries_of(layout, rank)
    rows = [HeaderEntry(entry.key, "U8", entry.box.sizes, entry.nbytes) for entry in entries]
    header = build_header(rows, {"format": "pt"}) if encode == "raw" else b""
    where = run if arena_run is None else arena_run
    arena = client.arena(len(header) + nbytes, where, 30, snapshots=snapshots, budget_bytes=budget_bytes)
    arena.view[: len(header)] = header
    arena.view[len(header) : len(header) + nbytes] = payload(step, rank, nbytes)
    file = FileTask(
        group="model",
        name=data_name("model", rank, world, encode),
        arena_offset=0,
        nbytes=len(header) + nbytes,
        header_nbytes=len(header),
        shards=tuple(entry.nbytes for entry in entries),
    )
    return arena, SaveTask(
        run=run,
        step=step,
        writer=writer,
        save=save,
        rank=rank,
        world=world,
        arena=arena.id,
        encode=encode,
        files=(file,),
        layout=digest,
        rank_tensors=(),
        values={"epoch": step} if rank == 0 else None,
        values_digests=digests if digests is not None else {"epoch": values_digest(step)},
        rank_values={},
        layouts=(LayoutTask(digest, raw, ((0, world - 1),)),) if rank == 0 else (),
        keep=KeepPolicy(keep_last, keep_every),
        **task,
    )


class Rank:
    """The commands."""

    def __init__(self) -> None:
        self.client: KeeperClient | None = None
        self.pending: dict[int, PendingTask] = {}

    def connect(self, rank: int) -> int:
        """The keeper's pid."""
        self.client = KeeperClient.connect(rank)
        return self.client.keeper_pid

    def save(self, run: str, step: int, save: int, **options: Any) -> None:
        """Returns as soon as it is staged."""
        self.hand_over(run, step, save, **options)
        self.pending[save].wait_staged(30)

    def hand_over(self, run: str, step: int, save: int, **options: Any) -> None:
        """Announce all of it, and wait neither until it is staged nor until it has failed, which may come first."""
        assert self.client is not None
        self.pending[save] = stage(self.client, run, step, save, **options)

    def begin(self, run: str, step: int, save: int, ready: int, **options: Any) -> None:
        """Begin a save and announce only so much of it."""
        assert self.client is not None
        self.pending[save] = self.client.begin(fill(self.client, run, step, save, **options)[1])
        self.pending[save].ready(ready)

    def borrow(self, run: str, nbytes: int) -> int:
        """The arena's id."""
        assert self.client is not None
        return self.client.arena(nbytes, run).id

    def abandon(self, run: str, step: int, save: int, world: int, message: str) -> None:
        """Give an attempt up."""
        assert self.client is not None
        self.client.abandon(run, Attempt(step, 1, save), self.client.rank, world, message)

    def wait(self, save: int) -> dict[str, Any]:
        """The SaveResult."""
        result = self.pending[save].wait(60)
        return {name: getattr(result, name) for name in result.__struct_fields__}

    def close(self, done: bool = True) -> None:
        """Say bye."""
        assert self.client is not None
        self.client.close(done)

    def fds(self) -> int:
        """How many descriptors are open."""
        return len(os.listdir("/proc/self/fd"))


def main() -> None:
    """Answer ``{"ok": value}``, ``{"error": kind, "message": text}`` to each ``{"do": name, ...}``."""
    rank = Rank()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(rank, command.pop("do"))(**command)}
        except CkptError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
