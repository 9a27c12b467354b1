"""One process group's hold on one run: its writer, its plan, and the saves under way."""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ckpt.engine import budget
from ckpt.engine.alarms import RAISE, AlarmWatch
from ckpt.engine.bounded import BoundedStore
from ckpt.engine.failures import WARN
from ckpt.engine.filling import Laid, fill, lay
from ckpt.engine.following import DRAIN_TIMEOUT_S, Following
from ckpt.engine.job import job_name, keeper_client, leave
from ckpt.engine.options import ALARMS, PROGRESS_TIMEOUT_S, SaveOptions, measured, whole_number
from ckpt.engine.pending import PendingSave, SaveReport
from ckpt.engine.prepare import (
    Prepared,
    SavePlan,
    compare_values,
    make_plan,
    no_collection,
    prepare,
    unchanged,
)
from ckpt.engine.ranks import Ranks
from ckpt.errors import BadInputError, CkptError, KeeperError
from ckpt.format.commit import Attempt
from ckpt.format.metrics import encode_metrics
from ckpt.format.writer import Writer
from ckpt.keeper.client import ArenaView, KeeperClient, PendingTask
from ckpt.keeper.protocol import SaveTask
from ckpt.plan.save import Structure
from ckpt.run import Run
from ckpt.snapshot.overlap import refuse_untimely_steps
from ckpt.state import Inspector


class Planned(msgspec.Struct, frozen=True):
    """What saves of one structure have in common. Kept until the structure changes on some rank."""

    structure: Structure
    digests: tuple[str, ...]  # of the structures, by rank
    plan: SavePlan


class Session:
    """The opening of one run by one process group. Made by the first save or load; lives as long as the process."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.run = run
        self.ranks = ranks
        self._renewals = ranks.renewals
        self.writer: Writer | None = None
        self.loaded_step: int | None = None
        self._alarms = AlarmWatch(ranks)
        self.saves = Following(run, ranks.rank, self._alarms.note)
        self._last_step: int | None = None
        self._saves = 0
        self._metrics: dict[str, float] = {}  # of the save that is being made; rank 0's
        self._inspector = Inspector(ranks.rank)
        self._planned: Planned | None = None
        self._parity_ranks: tuple[int, ...] = ()  # of this node; asked for by the first save with parity
        self._parity_groups: tuple[int, ...] = ()  # the lowest rank of every node
        self._laid: Laid | None = None

    def begin(self, doing: str, progress_timeout_s: float) -> None:
        """A verb begins. Collective if one before it has failed between the ranks: what they left apart is agreed anew.

        Storage is waited for as long as ``progress_timeout_s``. Raises RankError when not all ranks come.
        """
        if isinstance(self.run.store, BoundedStore):
            self.run.store.limit_s = progress_timeout_s
        self.ranks.begin(doing)
        if self._renewals == self.ranks.renewals:
            return
        everyone = self.ranks.gather((None if self.writer is None else self.writer.number, self._saves))
        if self.writer is not None and len({number for number, _ in everyone}) > 1:  # it failed in opening the run
            self.writer = self.loaded_step = None
        self._saves = max(saves for _, saves in everyone)  # no number is used twice
        self._planned, self._parity_ranks, self._parity_groups = None, (), ()
        self._renewals = self.ranks.renewals

    # -- opening ---------------------------------------------------------------------------

    def loaded(self, step: int) -> None:
        """The group has loaded ``step``: what it writes next goes on from there, as a new writer if need be."""
        self.loaded_step = step
        if self.saves.loaded() or step != self._last_step:
            self.writer = None

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
        self, step: int, state: Mapping[str, Any], options: SaveOptions, metrics: Mapping[str, Any] | None = None
    ) -> PendingSave:
        """Copy the state into an arena, which the keeper writes. Collective; see ``ckpt.save``."""
        started = time.perf_counter()
        self.saves.failures.tried += 1
        with no_collection():
            try:
                return self._save(step, state, options, metrics or {}, started)
            except CkptError as error:
                # Agreed by all ranks: each has the failing one's error, or one with its exit code.
                if not self.saves.may_survive(error, options):
                    raise
                return self._survived(step, None, error, options, started)

    def _survived(
        self, step: int, attempt: Attempt | None, error: CkptError, options: SaveOptions, started: float
    ) -> PendingSave:
        pending = PendingSave.failed(step, attempt, time.perf_counter() - started, error, options.on_error)
        self.saves.keep(pending)
        return pending

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        options: SaveOptions,
        metrics: Mapping[str, Any],
        started: float,
    ) -> PendingSave:
        ranks = self.ranks
        prepared, client, planned = self._agree(step, state, options, metrics)
        self._alarms.judge(prepared, planned.plan, options.alarms)
        writer = self._open(step)
        if options.parity and not self._parity_ranks:
            self._find_nodes(client)
        self._saves += 1
        self._last_step = step
        attempt = Attempt(step, writer.number, self._saves)
        laid = self._laid = lay(planned.plan, prepared, ranks, options.encode, self._laid)
        try:
            try:
                arena, task = self._begin(client, attempt, prepared, laid, options)
            except KeeperError:
                if client.alive:
                    raise
                self.saves.raise_untold(has_writer=True)
                client = keeper_client(ranks.rank)  # it went just now; nothing of this save was lost with it
                arena, task = self._begin(client, attempt, prepared, laid, options)
            giving_up = functools.partial(self._abandon, client, attempt)
            overlap = fill(
                arena.view, laid, prepared.flat, task, ranks.world, overlap=options.overlap, abandon=giving_up
            )
        except BaseException as error:
            self._abandon(client, attempt, error)
            if not isinstance(error, CkptError) or not self.saves.may_survive(error, options):
                raise
            return self._survived(step, attempt, error, options, started)
        self._warm(client, laid, options)  # the other arena, after the first save
        pending = PendingSave(step, attempt, time.perf_counter() - started, task, overlap, options.on_error)
        self.saves.keep(pending)
        return pending

    def _abandon(self, client: KeeperClient, attempt: Attempt, error: BaseException) -> None:
        """The other ranks' keepers wait for this rank's part: they must learn that it never comes."""
        code = error.exit_code if isinstance(error, CkptError) else CkptError.exit_code
        why = f"{type(error).__name__}: {error}"
        client.abandon(self.run.url, attempt, self.ranks.rank, self.ranks.world, why, code)

    def warm(self, state: Mapping[str, Any], options: SaveOptions) -> None:
        """Start the keeper, plan, and have memory for saves of such a state touched in the background. Collective.

        Raises, on every rank, what would keep the first save from being made, too little memory among it.
        """
        ranks = self.ranks
        self.begin("the preparation of saves", options.progress_timeout_s)
        prepared, client = ranks.all_or_none(lambda: self._look(state, options))
        planned = self._plan(prepared, ranks.gather(prepared.structure.digest()))
        laid = self._laid = lay(planned.plan, prepared, ranks, options.encode, self._laid)
        budget.check(ranks, client, self.run.url, laid.nbytes, options)
        self._warm(client, laid, options)

    def _agree(
        self, step: int, state: Mapping[str, Any], options: SaveOptions, metrics: Mapping[str, Any]
    ) -> tuple[Prepared, KeeperClient, Planned]:
        """What every rank has to save. One small all-reduce when nothing has changed since the last time."""
        ranks = self.ranks
        seen: tuple[Prepared, KeeperClient] | None = None
        failure: Exception | None = None
        digest = ""
        slots = self._alarms.begin(self._saves, self.loaded_step)
        self.begin(f"the save of step {step}", options.progress_timeout_s)
        try:
            self.saves.wait_copied()
            self.saves.raise_standing(has_writer=self.writer is not None)
            whole_number(step, "step", least=0)
            self._metrics = measured(metrics) if ranks.rank == 0 else {}
            seen = self._look(state, options)
            digest = seen[0].values_digest()
            if self._planned is not None:
                slots = self._alarms.samples(seen[0], self._planned.structure, self._planned.plan, options.alarms)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must learn of it
            failure = error
        planned = self._planned
        known = seen is not None and planned is not None and unchanged(seen[0].structure, planned.structure)
        policy = (options.parity, int(options.on_error == WARN), ALARMS.index(options.alarms))
        numbers = (step, _number(digest), *policy) if seen is not None else (0, 0, *policy)
        (new_structure, no_writer), same, differing = ranks.agree([not known, self.writer is None], numbers, slots)
        if no_writer:
            self.writer = None  # a rank was fenced before others had heard of it: all open the run anew
        if new_structure or not same:
            return self._agree_anew(step, options, seen, digest, failure)
        assert seen is not None  # else the structure would be new
        assert planned is not None
        self._alarms.compared(differing)
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
        told = {p.attempt for p in self.saves.pending if p.told}
        told.update(*ranks.gather(told))
        for pending in self.saves.pending:  # a lost save fails one later save, whenever each rank hears of it
            pending.told = pending.told or pending.attempt in told

        def look() -> tuple[tuple[Prepared, KeeperClient], tuple[int, str, str, int, str, str]]:
            if failure is not None:
                raise failure
            assert seen is not None
            policy = (options.parity, options.on_error, options.alarms)
            return seen, (step, seen[0].structure.digest(), digest, *policy)

        (prepared, client), looks = ranks.exchange(look)
        if any(look[0] != step for look in looks):
            raise BadInputError(f"the ranks save different steps: {[look[0] for look in looks]}")
        if any(look[3] != options.parity for look in looks):
            raise BadInputError(f"the ranks ask for different parity: {[look[3] for look in looks]}; give all the same")
        if any(look[4] != options.on_error for look in looks):
            raise BadInputError(f"the ranks have different on_error: {[look[4] for look in looks]}; give all the same")
        if any(look[5] != options.alarms for look in looks):
            raise BadInputError(f"the ranks have different alarms: {[look[5] for look in looks]}; give all the same")
        if len({look[2] for look in looks}) > 1:
            compare_values(ranks, prepared.values.digests)
        return prepared, client, self._plan(prepared, [look[1] for look in looks])

    def _look(self, state: Mapping[str, Any], options: SaveOptions) -> tuple[Prepared, KeeperClient]:
        if self.run.store.in_memory:
            raise BadInputError(
                f"{self.run.url}: lives in the memory of this one process, but the keeper, which writes saves, is "
                "another one; save to a path or to a storage that both reach"
            )
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
            metrics=encode_metrics(attempt, self._metrics) if self._metrics else None,
            keep=options.keep,
            progress_timeout_s=options.progress_timeout_s,
            max_write_mbps=options.max_write_mbps,
            parity_ranks=self._parity_ranks if options.parity else (),
            parity_groups=self._parity_groups if options.parity and first else (),
            watch=self._alarms.task(laid.files, prepared.flat, options.alarms),
            found=self._alarms.found if first else (),
            alarms_fail=first and options.alarms == RAISE,
        )

    def _find_nodes(self, client: KeeperClient) -> None:
        """Which ranks share a keeper, and so a parity file. Collective, once."""
        nodes = self.ranks.gather((socket.gethostname(), client.keeper_pid))
        lowest = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        self._parity_groups = tuple(sorted(lowest.values()))
        self._parity_ranks = tuple(rank for rank, node in enumerate(nodes) if node == nodes[self.ranks.rank])

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> SaveReport | None:
        """Wait for every save under way; raises the first that failed and was not got over. Returns the last report."""
        return self.saves.drain(timeout_s, has_writer=self.writer is not None)

    def _warm(self, client: KeeperClient, laid: Laid, options: SaveOptions) -> None:
        client.warm(laid.nbytes, self.run.url, snapshots=options.snapshots, budget_bytes=options.budget_bytes)


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
        store = BoundedStore(run.store, PROGRESS_TIMEOUT_S, ranks.sign)
        session = _sessions[key] = Session(Run(store), ranks)
    return session


def _end_all() -> None:
    """A normal exit waits for what is under way; a failure that nobody saw is said aloud."""
    for session in list(_sessions.values()):
        try:
            session.drain()
        except (CkptError, TimeoutError) as error:
            print(f"ckpt: {error}", file=sys.stderr)
        if len(session.saves.failures.failed) > session.saves.failures.summarized:
            session.saves.say_where()
    leave()
    _sessions.clear()
