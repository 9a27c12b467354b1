"""One process group's hold on one run: its writer, its keeper, its plan, and the saves under way."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ckpt.engine.prepare import (
    ArenaFile,
    Prepared,
    SavePlan,
    arena_files,
    compare_values,
    local_slices,
    make_plan,
    prepare,
)
from ckpt.engine.ranks import Ranks
from ckpt.errors import BadInputError, CkptError, FencedError, error_from_kind
from ckpt.format.commit import Attempt
from ckpt.format.part import RankTensor
from ckpt.format.writer import Writer
from ckpt.keeper.client import KeeperClient, PendingTask
from ckpt.keeper.protocol import SaveTask
from ckpt.plan.boxes import shard_box, unravel
from ckpt.run import Run
from ckpt.snapshot.copy import copy_into
from ckpt.state import FlatState, TensorLeaf

PROGRESS_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 1800.0


class SaveReport(msgspec.Struct, frozen=True):
    """What a committed save cost: this rank's bytes and seconds."""

    step: int
    attempt: str
    nbytes: int  # written by this rank
    stall_s: float  # how long save() kept the caller
    write_s: float  # from the begin of the copy until this rank's bytes were durable
    commit_s: float  # from staged to committed


class PendingSave:
    """A save under way. It needs no further care: the keeper finishes it even if this process dies."""

    def __init__(self, step: int, attempt: Attempt, stall_s: float, task: PendingTask) -> None:
        self.step = step
        self.attempt = attempt.label
        self.stall_s = stall_s
        self.told = False  # whether its error was raised to the caller
        self._task = task

    @property
    def staged(self) -> bool:
        """Whether the keeper has the snapshot: from then on a dead trainer loses nothing."""
        return self._task.staged

    @property
    def committed(self) -> bool:
        """Whether the step exists."""
        return self._task.done and self._task.error is None

    @property
    def done(self) -> bool:
        """Whether it has ended, committed or failed."""
        return self._task.done

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until the step is committed. Raises what made the save fail, or TimeoutError."""
        try:
            done = self._task.wait(timeout_s)
        except CkptError:
            self.told = True
            raise
        return SaveReport(self.step, self.attempt, done.nbytes_written, self.stall_s, done.write_s, done.commit_s)

    @property
    def error(self) -> CkptError | None:
        """What made it fail, once it has."""
        return self._task.error if self._task.done else None


class Session:
    """The opening of one run by one process group. Made by the first save or load; lives as long as the process."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.run = run
        self.ranks = ranks
        self.writer: Writer | None = None
        self.loaded_step: int | None = None
        self._fenced: FencedError | None = None
        self._last_step: int | None = None
        self._saves = 0
        self._plan_key: tuple[str, ...] = ()
        self._plan: SavePlan | None = None
        self.pending: list[PendingSave] = []

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

    def save(
        self,
        step: int,
        state: Any,
        *,
        encode: str = "raw",
        keep_last: int | None = None,
        keep_every: int | None = None,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
    ) -> PendingSave:
        """Copy the state into an arena, which the keeper writes, if it can meanwhile. Collective; see ``ckpt.save``."""
        started = time.perf_counter()
        ranks = self.ranks

        def look() -> tuple[tuple[Prepared, KeeperClient], tuple[int, str, str]]:
            self._raise_standing()
            whole_number(step, "step", least=0)
            prepared = prepare(state, ranks.rank, ranks.world)
            told = (step, prepared.structure.digest(), prepared.values_digest())
            return (prepared, keeper_client(ranks.rank)), told

        (prepared, client), looks = ranks.exchange(look)
        if any(found != step for found, _, _ in looks):
            raise BadInputError(f"the ranks save different steps: {[found for found, _, _ in looks]}")
        if len({digest for _, _, digest in looks}) > 1:
            compare_values(ranks, prepared.values.digests)
        key = tuple(digest for _, digest, _ in looks)
        plan = self._plan_for(prepared, key)
        writer = self._open(step)
        self._saves += 1
        self._last_step = step
        attempt = Attempt(step, writer.number, self._saves)
        flat, values = prepared.flat, prepared.values
        rank_tensors = _rank_tensors(flat)
        files, arena_nbytes = arena_files(plan, ranks.rank, ranks.world, rank_tensors, encode)
        try:
            arena = client.arena(arena_nbytes, self.run.url)
            task = SaveTask(
                run=self.run.url,
                step=step,
                writer=writer.number,
                save=self._saves,
                rank=ranks.rank,
                world=ranks.world,
                arena=arena.id,
                encode=encode,
                files=tuple(file.task for file in files),
                layout=plan.encoded[plan.mine].digest,
                rank_tensors=rank_tensors,
                values=values.shared if plan.first_of_layout else None,
                values_digests=values.digests,
                rank_values=values.own,
                layouts=plan.encoded if ranks.rank == 0 else (),
                hf_index=plan.hf_index if ranks.rank == 0 and encode == "raw" else None,
                keep_last=keep_last,
                keep_every=keep_every,
                progress_timeout_s=progress_timeout_s,
            )
            pending_task = client.begin(task)
            behind = _has_spare_core(ranks.world)
            _fill(arena.view, files, flat, ranks.rank, pending_task.ready if behind else lambda _: None)
            pending_task.ready(pending_task.end)
        except BaseException as error:
            # The other ranks' keepers wait for this rank's part: they must learn that it never comes.
            client.abandon(self.run.url, attempt, ranks.rank, ranks.world, f"{type(error).__name__}: {error}")
            raise
        client.warm(arena_nbytes, self.run.url)  # the other arena, after the first save
        pending = PendingSave(step, attempt, time.perf_counter() - started, pending_task)
        self.pending = [p for p in self.pending if not p.done or (p.error is not None and not p.told)] + [pending]
        return pending

    def warm(self, state: Any, *, encode: str) -> None:
        """Start the keeper, plan, and have memory for saves of such a state touched in the background. Collective.

        Nothing but time is lost when it cannot be done: the first save does it then, or says what is wrong.
        """
        ranks = self.ranks

        def look() -> tuple[tuple[Prepared, KeeperClient], str]:
            prepared = prepare(state, ranks.rank, ranks.world)
            return (prepared, keeper_client(ranks.rank)), prepared.structure.digest()

        with contextlib.suppress(Exception):
            (prepared, client), key = ranks.exchange(look)
            plan = self._plan_for(prepared, tuple(key))
            rank_tensors = _rank_tensors(prepared.flat)
            _, arena_nbytes = arena_files(plan, ranks.rank, ranks.world, rank_tensors, encode)
            client.warm(arena_nbytes, self.run.url)

    def _plan_for(self, prepared: Prepared, key: tuple[str, ...]) -> SavePlan:
        """The plan for these structure digests, one per rank. Collective when they are others than the last time."""
        if self._plan is None or key != self._plan_key:
            self._plan = make_plan(self.ranks, prepared, key)
            self._plan_key = key
        return self._plan

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
                report = pending.result(max(0.0, deadline - time.monotonic()))
        self.raise_untold()
        return report


def _fill(
    view: memoryview, files: list[ArenaFile], flat: FlatState, rank: int, progress: Callable[[int], None]
) -> None:
    """Headers first, since ``progress`` may pass them; then every shard, in the order of the arena."""
    leaves: dict[str, TensorLeaf] = {leaf.name: leaf for leaf in (*flat.tensors, *flat.rank_tensors)}
    copies = []
    for file in files:
        start = file.task.arena_offset
        view[start : start + len(file.header)] = file.header
        start += len(file.header)
        for entry in file.entries:
            leaf = leaves[entry.name]
            copies.append((local_slices(leaf, entry, _held_offsets(leaf, rank)), start + entry.offset))
    copy_into(view, copies, progress)


def _has_spare_core(world: int) -> bool:
    """Whether the keeper can write while the ranks of this node copy without taking a core from one of them.

    Measured on 2 cores: with 1 rank, writing behind the copy made a save durable in two thirds of the time and
    the stall no longer; with 2 ranks it made the stall longer by a fifth. The stall goes first.
    """
    return (os.cpu_count() or 1) > int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _rank_tensors(flat: FlatState) -> tuple[RankTensor, ...]:
    return tuple(RankTensor(t.name, t.dtype, t.shape, t.kind) for t in flat.rank_tensors)


def _held_offsets(leaf: TensorLeaf, rank: int) -> tuple[int, ...]:
    if leaf.mesh_shape is None or leaf.mesh_ranks is None:
        return (0,) * len(leaf.shape)
    coordinate = unravel(leaf.mesh_ranks.index(rank), leaf.mesh_shape)
    return shard_box(leaf.mesh_shape, leaf.placements, leaf.shape, coordinate).offsets


def _of_earlier(pending: PendingSave, error: CkptError) -> CkptError:
    return error_from_kind(type(error).__name__, f"the save of step {pending.step} failed: {error}")


def whole_number(value: Any, what: str, *, least: int) -> int:
    """``value`` if it is an int (True is not) of at least ``least`` and below 2**63, else BadInputError."""
    if type(value) is not int or not least <= value < 2**63:
        raise BadInputError(f"{what} {value!r}: expected a whole number of at least {least}")
    return value


def job_name() -> str:
    """What a writer record calls this job: the scheduler's or launcher's id, else the process."""
    for variable in ("CKPT_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"):
        if os.environ.get(variable):
            return f"job {os.environ[variable]}"
    return f"process {os.getpid()}"


_sessions: dict[tuple[str, int], Session] = {}
_clients: dict[int, KeeperClient] = {}  # rank -> this process's connection to its job's keeper


def keeper_client(rank: int) -> KeeperClient:
    """This process's connection to its keeper, which is started when there is none. Raises KeeperError."""
    client = _clients.get(rank)
    if client is None or not client.alive:
        if client is not None:
            print("ckpt: the keeper is gone; starting another one", file=sys.stderr)
            client.close(done=False)
        client = _clients[rank] = KeeperClient.connect(rank)
    return client


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
    for client in _clients.values():
        client.close(done=True)
    _clients.clear()
    _sessions.clear()
