"""One process group's hold on one run: its writer, its plan, and the saves under way."""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from ckpt.engine import budget
from ckpt.engine.job import has_spare_core, job_name, keeper_client, leave
from ckpt.engine.options import SaveOptions, whole_number
from ckpt.engine.pending import PendingSave, SaveReport
from ckpt.engine.prepare import (
    ArenaFile,
    Piece,
    Prepared,
    SavePlan,
    arena_files,
    arena_pieces,
    compare_values,
    make_plan,
    no_collection,
    prepare,
    unchanged,
)
from ckpt.engine.ranks import Ranks
from ckpt.errors import BadInputError, CkptError, FencedError, KeeperError, error_from_kind
from ckpt.format.commit import Attempt
from ckpt.format.part import RankTensor
from ckpt.format.writer import Writer
from ckpt.keeper.client import ArenaView, KeeperClient, PendingTask
from ckpt.keeper.protocol import SaveTask
from ckpt.plan.save import Structure
from ckpt.run import Run
from ckpt.snapshot.copy import copy_into
from ckpt.snapshot.overlap import Late, Overlap, may_be_late, refuse_untimely_steps
from ckpt.state import FlatState, Inspector

DRAIN_TIMEOUT_S = 1800.0


class Planned(msgspec.Struct, frozen=True):
    """What saves of one structure have in common. Kept until the structure changes on some rank."""

    structure: Structure
    digests: tuple[str, ...]  # of the structures, by rank
    plan: SavePlan


class Laid(msgspec.Struct, frozen=True):
    """This rank's arena as it will be filled; depends on the plan, and on what little is this rank's own."""

    plan: SavePlan
    rank_tensors: tuple[RankTensor, ...]
    encode: str
    files: list[ArenaFile]
    pieces: list[Piece]
    nbytes: int


class Session:
    """The opening of one run by one process group. Made by the first save or load; lives as long as the process."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.run = run
        self.ranks = ranks
        self.writer: Writer | None = None
        self.loaded_step: int | None = None
        self.pending: list[PendingSave] = []
        self._fenced: FencedError | None = None
        self._last_step: int | None = None
        self._saves = 0
        self._inspector = Inspector(ranks.rank)
        self._planned: Planned | None = None
        self._parity_ranks: tuple[int, ...] = ()  # of this node; asked for by the first save with parity
        self._parity_groups: tuple[int, ...] = ()  # the lowest rank of every node
        self._laid: Laid | None = None

    # -- opening ---------------------------------------------------------------------------

    def loaded(self, step: int) -> None:
        """The group has loaded ``step``: what it writes next goes on from there, as a new writer if need be."""
        self.loaded_step = step
        fenced = self._fenced is not None or any(isinstance(p.error, FencedError) for p in self.pending)
        if fenced or step != self._last_step:
            self.writer = None
        self._fenced = None

    def _open(self, step: int) -> Writer:
        if self.writer is None:
            self.writer = self.ranks.from_first(lambda: self._create_writer(step))
            self._saves = 0
            self._last_step = self.writer.resumed_from
        elif self._last_step is not None:
            self._refuse_earlier(step, self._last_step)
        return self.writer

    def _create_writer(self, step: int) -> Writer:
        resumed_from = self.loaded_step
        if resumed_from is None:
            newest = next((s for s in self.run.live_steps() if s.commit is not None), None)
            resumed_from = None if newest is None else newest.attempt.step
        if resumed_from is not None:
            self._refuse_earlier(step, resumed_from)  # before the record: it would fence whoever writes now
        return self.run.open_writer(job=job_name(), world=self.ranks.world, resumed_from=resumed_from)

    def _refuse_earlier(self, step: int, last: int) -> None:
        if step < last:
            raise BadInputError(
                f"{self.run.url}: step {step} is before step {last}, which this run has already; "
                "load the step to go on from first, roll the run back, or save to another folder"
            )

    # -- saving ----------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], options: SaveOptions) -> PendingSave:
        """Copy the state into an arena, which the keeper writes. Collective; see ``ckpt.save``."""
        with no_collection():
            return self._save(step, state, options)

    def _save(self, step: int, state: Mapping[str, Any], options: SaveOptions) -> PendingSave:
        started = time.perf_counter()
        ranks = self.ranks
        prepared, client, planned = self._agree(step, state, options)
        writer = self._open(step)
        if options.parity and not self._parity_ranks:
            self._find_nodes(client)
        self._saves += 1
        self._last_step = step
        attempt = Attempt(step, writer.number, self._saves)
        laid = self._lay(planned.plan, prepared, options.encode)
        try:
            try:
                arena, task = self._begin(client, attempt, prepared, laid, options)
            except KeeperError:
                if client.alive:
                    raise
                self.raise_untold()
                client = keeper_client(ranks.rank)  # it went just now; nothing of this save was lost with it
                arena, task = self._begin(client, attempt, prepared, laid, options)
            overlap = self._fill(arena.view, laid, prepared.flat, task, client, attempt, overlap=options.overlap)
        except BaseException as error:
            # The other ranks' keepers wait for this rank's part: they must learn that it never comes.
            client.abandon(self.run.url, attempt, ranks.rank, ranks.world, f"{type(error).__name__}: {error}")
            raise
        self._warm(client, laid, options)  # the other arena, after the first save
        pending = PendingSave(step, attempt, time.perf_counter() - started, task, overlap)
        self.pending = [p for p in self.pending if not p.done or (p.error is not None and not p.told)] + [pending]
        return pending

    def warm(self, state: Mapping[str, Any], options: SaveOptions) -> None:
        """Start the keeper, plan, and have memory for saves of such a state touched in the background. Collective.

        Raises, on every rank, what would keep the first save from being made, too little memory among it.
        """
        ranks = self.ranks
        prepared, client = ranks.all_or_none(lambda: self._look(state, options))
        planned = self._plan(prepared, ranks.gather(prepared.structure.digest()))
        laid = self._lay(planned.plan, prepared, options.encode)
        budget.check(ranks, client, self.run.url, laid.nbytes, options)
        self._warm(client, laid, options)

    def _agree(
        self, step: int, state: Mapping[str, Any], options: SaveOptions
    ) -> tuple[Prepared, KeeperClient, Planned]:
        """What every rank has to save. One small all-reduce when nothing has changed since the last time."""
        ranks = self.ranks
        seen: tuple[Prepared, KeeperClient] | None = None
        failure: Exception | None = None
        digest = ""
        try:
            self.wait_copied()
            self._raise_standing()
            whole_number(step, "step", least=0)
            seen = self._look(state, options)
            digest = seen[0].values_digest()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must learn of it
            failure = error
        planned = self._planned
        known = seen is not None and planned is not None and unchanged(seen[0].structure, planned.structure)
        numbers = (step, _number(digest), options.parity) if seen is not None else (0, 0, 0)
        (new_structure, no_writer), same = ranks.agree([not known, self.writer is None], numbers)
        if no_writer:
            self.writer = None  # a rank was fenced before others had heard of it: all open the run anew
        if new_structure or not same:
            return self._agree_anew(step, options, seen, digest, failure)
        assert seen is not None  # else the structure would be new
        assert planned is not None
        return *seen, planned

    def _agree_anew(
        self,
        step: int,
        options: SaveOptions,
        seen: tuple[Prepared, KeeperClient] | None,
        digest: str,
        failure: Exception | None,
    ) -> tuple[Prepared, KeeperClient, Planned]:
        """Every rank says what it has, so that each raises what is wrong, or all plan."""
        ranks = self.ranks
        told = {p.attempt for p in self.pending if p.told}
        told.update(*ranks.gather(told))
        for pending in self.pending:  # a lost save fails one later save, whenever each rank hears of it
            pending.told = pending.told or pending.attempt in told

        def look() -> tuple[tuple[Prepared, KeeperClient], tuple[int, str, str, int]]:
            if failure is not None:
                raise failure
            assert seen is not None
            return seen, (step, seen[0].structure.digest(), digest, options.parity)

        (prepared, client), looks = ranks.exchange(look)
        if any(look[0] != step for look in looks):
            raise BadInputError(f"the ranks save different steps: {[look[0] for look in looks]}")
        if any(look[3] != options.parity for look in looks):
            raise BadInputError(f"the ranks ask for different parity: {[look[3] for look in looks]}; give all the same")
        if len({look[2] for look in looks}) > 1:
            compare_values(ranks, prepared.values.digests)
        return prepared, client, self._plan(prepared, [look[1] for look in looks])

    def _look(self, state: Mapping[str, Any], options: SaveOptions) -> tuple[Prepared, KeeperClient]:
        prepared = prepare(state, self._inspector, self.ranks.world)
        if options.overlap:
            refuse_untimely_steps(prepared.flat.optimizers)
        return prepared, keeper_client(self.ranks.rank)

    def _plan(self, prepared: Prepared, digests: list[str]) -> Planned:
        """The plan for these structure digests, one per rank. Collective when they are others than the last time."""
        known, key = self._planned, tuple(digests)
        plan = known.plan if known is not None and known.digests == key else make_plan(self.ranks, prepared, key)
        self._planned = Planned(prepared.structure, key, plan)
        return self._planned

    def _lay(self, plan: SavePlan, prepared: Prepared, encode: str) -> Laid:
        rank_tensors = tuple(
            RankTensor(t.name, t.what.dtype, t.what.shape, t.what.kind) for t in prepared.flat.rank_tensors
        )
        laid = self._laid
        if laid is None or laid.plan is not plan or (laid.rank_tensors, laid.encode) != (rank_tensors, encode):
            files, nbytes = arena_files(plan, self.ranks.rank, self.ranks.world, rank_tensors, encode)
            pieces = arena_pieces(files, prepared.structure, self.ranks.rank)
            laid = self._laid = Laid(plan, rank_tensors, encode, files, pieces, nbytes)
        return laid

    def _begin(
        self, client: KeeperClient, attempt: Attempt, prepared: Prepared, laid: Laid, options: SaveOptions
    ) -> tuple[ArenaView, PendingTask]:
        arena = client.arena(laid.nbytes, self.run.url, snapshots=options.snapshots, budget_bytes=options.budget_bytes)
        return arena, client.begin(self._task(attempt, prepared, laid, arena, options))

    def _task(
        self, attempt: Attempt, prepared: Prepared, laid: Laid, arena: ArenaView, options: SaveOptions
    ) -> SaveTask:
        plan, values, first = laid.plan, prepared.values, self.ranks.rank == 0
        return SaveTask(
            run=self.run.url,
            step=attempt.step,
            writer=attempt.writer,
            save=attempt.save,
            rank=self.ranks.rank,
            world=self.ranks.world,
            arena=arena.id,
            encode=options.encode,
            files=tuple(file.task for file in laid.files),
            layout=plan.encoded[plan.mine].digest,
            rank_tensors=laid.rank_tensors,
            values=values.shared if plan.first_of_layout else None,
            values_digests=values.digests,
            rank_values=values.own,
            layouts=plan.encoded if first else (),
            hf_index=plan.hf_index if first and options.encode == "raw" else None,
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            progress_timeout_s=options.progress_timeout_s,
            max_write_mbps=options.max_write_mbps,
            parity_ranks=self._parity_ranks if options.parity else (),
            parity_groups=self._parity_groups if options.parity and first else (),
        )

    def _find_nodes(self, client: KeeperClient) -> None:
        """Which ranks share a keeper, and so a parity file. Collective, once."""
        nodes = self.ranks.gather((socket.gethostname(), client.keeper_pid))
        lowest = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        self._parity_groups = tuple(sorted(lowest.values()))
        self._parity_ranks = tuple(rank for rank, node in enumerate(nodes) if node == nodes[self.ranks.rank])

    def _fill(
        self,
        view: memoryview,
        laid: Laid,
        flat: FlatState,
        task: PendingTask,
        client: KeeperClient,
        attempt: Attempt,
        *,
        overlap: bool,
    ) -> Overlap | None:
        """Headers first, since the watermark may pass them; then every tensor, in the order of the arena."""
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
        if not late:
            copy_into(view, early, task.ready if has_spare_core(self.ranks.world) else None)
            task.ready(task.end)
            return None
        copy_into(view, early)

        def finish(error: BaseException | None) -> None:
            if error is None:
                task.ready(task.end)
            else:
                why = f"{type(error).__name__}: {error}"
                client.abandon(self.run.url, attempt, self.ranks.rank, self.ranks.world, why)

        # What is final is announced as it comes only where nobody else needs the core that writes it.
        return Overlap(view, late, task.ready if has_spare_core(self.ranks.world) else None, finish)

    def _warm(self, client: KeeperClient, laid: Laid, options: SaveOptions) -> None:
        client.warm(laid.nbytes, self.run.url, snapshots=options.snapshots, budget_bytes=options.budget_bytes)

    def wait_copied(self) -> None:
        """Wait until no save reads the state any more: from then on anyone may change it."""
        for pending in self.pending:
            pending.wait_copied()

    def _raise_standing(self) -> None:
        self.raise_untold()
        if self._fenced is not None:
            raise FencedError(f"{self._fenced}; load from the run before saving to it again")

    def raise_untold(self) -> None:
        """Raise the error of an earlier save that nobody was told of: no failure is silent."""
        for pending in self.pending:
            error = pending.error
            if isinstance(error, FencedError) and self.writer is not None:  # else the group has loaded since
                self._fenced = error
            if error is not None and not pending.told:
                pending.told = True
                raise _of_earlier(pending, error) from error

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> SaveReport | None:
        """Wait for every save under way; raises the first failure. Returns the last report."""
        deadline = time.monotonic() + timeout_s
        report = None
        for pending in self.pending:
            if pending.error is None:
                was_told = pending.told
                try:
                    report = pending.result(max(0.0, deadline - time.monotonic()))
                except CkptError:
                    if not was_told:
                        raise
        self.raise_untold()
        return report


def _of_earlier(pending: PendingSave, error: CkptError) -> CkptError:
    return error_from_kind(type(error).__name__, f"the save of step {pending.step} failed: {error}")


def _number(digest: str) -> int:
    """63 bits of a digest, which are compared as a number."""
    return int(digest[:16], 16) >> 1 if digest else 0


_sessions: dict[tuple[str, int], Session] = {}


def session_of(url: str | os.PathLike[str]) -> Session:
    """This process group's session on a run. The first call on a process group is collective."""
    ranks = Ranks.current()
    run = Run.open(url)
    key = (run.url, ranks.number)
    session = _sessions.get(key)
    if session is None:
        if not _sessions:
            # Not atexit: children of multiprocessing (torch's launchers with spawn or forkserver) skip that.
            multiprocessing.util.Finalize(None, _end_all, exitpriority=10)
        session = _sessions[key] = Session(run, ranks)
    return session


def _end_all() -> None:
    """A normal exit waits for what is under way; a failure that nobody saw is said aloud."""
    for session in list(_sessions.values()):
        try:
            session.drain()
        except (CkptError, TimeoutError) as error:
            print(f"ckpt: {error}", file=sys.stderr)
    leave()
    _sessions.clear()
