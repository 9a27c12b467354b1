"""One rank's arena: how its files lie in it, and the copy of the state into it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from ckpt.engine.job import has_spare_core
from ckpt.engine.prepare import ArenaFile, Piece, Prepared, SavePlan, arena_files, arena_pieces
from ckpt.engine.ranks import Ranks
from ckpt.format.part import RankTensor
from ckpt.keeper.client import PendingTask
from ckpt.snapshot.copy import copy_into
from ckpt.snapshot.overlap import Late, Overlap, may_be_late
from ckpt.state import FlatState


class Laid(msgspec.Struct, frozen=True):
    """This rank's arena as it will be filled; depends on the plan, and on what little is this rank's own."""

    plan: SavePlan
    rank_tensors: tuple[RankTensor, ...]
    encode: str
    files: list[ArenaFile]
    pieces: list[Piece]
    nbytes: int


def lay(plan: SavePlan, prepared: Prepared, ranks: Ranks, encode: str, before: Laid | None) -> Laid:
    """How this rank's arena is to be filled; ``before``, the last answer, where nothing has changed since."""
    rank_tensors = tuple(
        RankTensor(t.name, t.what.dtype, t.what.shape, t.what.kind) for t in prepared.flat.rank_tensors
    )
    if before is not None and before.plan is plan and (before.rank_tensors, before.encode) == (rank_tensors, encode):
        return before
    files, nbytes = arena_files(plan, ranks.rank, ranks.world, rank_tensors, encode)
    pieces = arena_pieces(files, prepared.structure, ranks.rank)
    return Laid(plan, rank_tensors, encode, files, pieces, nbytes)


def fill(
    view: memoryview,
    laid: Laid,
    flat: FlatState,
    task: PendingTask,
    world: int,
    *,
    overlap: bool,
    abandon: Callable[[BaseException], None],
) -> Overlap | None:
    """Headers first, since the watermark may pass them; then every tensor, in the order of the arena.

    With ``overlap`` what the optimizers own is copied by the answer, behind the caller; ``abandon`` is called when
    that fails.
    """
    for file in laid.files:
        view[file.task.arena_offset : file.task.arena_offset + len(file.header)] = file.header
    tensors = {leaf.what.name: leaf.tensor for leaf in (*flat.tensors, *flat.rank_tensors)}
    early: list[tuple[torch.Tensor, int]] = []
    late: list[Late] = []
    for piece in laid.pieces:
        tensor = piece.of(tensors[piece.name])
        if overlap and piece.name in flat.stepped and may_be_late(tensor):
            late.append(Late(piece.name, tensor, piece.arena_offset))
        else:
            early.append((tensor, piece.arena_offset))
    # What is final is announced as it comes only where nobody else needs the core that writes it.
    announce = task.ready if has_spare_core(world) else None
    if not late:
        copy_into(view, early, announce)
        task.ready(task.end)
        return None
    copy_into(view, early)

    def finish(error: BaseException | None) -> None:
        if error is None:
            task.ready(task.end)
        else:
            abandon(error)

    return Overlap(view, late, announce, finish)
