"""``ckpt.load``, ``ckpt.read``, ``ckpt.latest``, ``ckpt.steps``: from a step back into a state."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import msgspec
import torch

from ckpt.engine.bounded import BoundedStore
from ckpt.engine.landing import TensorLanding
from ckpt.engine.options import PROGRESS_TIMEOUT_S, positive
from ckpt.engine.ranks import Ranks
from ckpt.engine.session import Session, session_of
from ckpt.errors import (
    BadInputError,
    CkptError,
    DamagedError,
    NotFoundError,
    UnsupportedFormatError,
    error_from_kind,
)
from ckpt.format.commit import Attempt, Commit
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.keeper.client import settle
from ckpt.keeper.memory import check_room
from ckpt.reading.fetch import Fetch
from ckpt.reading.parallel import fetch_all
from ckpt.reading.sources import repaired_texts
from ckpt.reading.step import StepReader
from ckpt.reading.tiers import Url, tiered
from ckpt.run import Run, StepState
from ckpt.snapshot.copy import as_integers
from ckpt.state import LoadTarget, Read, StoredState, StoredTensor, dtype_of, read_tree, wanted

SETTLE_TIMEOUT_S = 60.0
SPOILED = ", and must not be used"
# Ranks of a node from which on a tensor that all of them need is read through the page cache, so that the device reads
# it once. Two are quicker past it: 0.34 against 0.51 s for the same 0.75 GB each.
SHARED_FROM = 3

Result = TypeVar("Result")
Told = TypeVar("Told")


class Skipped(msgspec.Struct, frozen=True):
    """A step that a load of the latest passed over, and why."""

    step: int
    attempt: str
    why: str


class LoadReport(msgspec.Struct, frozen=True):
    """What a load did on this rank."""

    step: int
    attempt: str
    missing: tuple[str, ...]  # the state has it, the step does not
    unexpected: tuple[str, ...]  # the step has it, the state does not
    mismatched: tuple[str, ...]  # name: stored and wanted dtype and shape
    ignored: tuple[str, ...]  # top-level entries of the step that the state does not ask for
    skipped: tuple[Skipped, ...]
    bytes_read: int
    # What was damaged or missing and came from elsewhere, on any rank: file, tensor, chunk, and from where. The files
    # themselves are as they were: `ckpt repair` puts them right.
    repaired: tuple[str, ...] = ()


class _BadStepError(Exception):
    """Some rank met damage in the step; ``spoiled``: when some of the target may have been filled already."""

    def __init__(self, message: str, *, spoiled: bool) -> None:
        super().__init__(message)
        self.spoiled = spoiled


def load(
    run: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | str = "latest",
    strict: bool = True,
    cast: bool = False,
    tiers: Sequence[Url] = (),
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
) -> LoadReport:
    """Fill ``state`` in place from a step; every rank of the process group calls it.

    Modules, optimizers and tensors are filled in place, objects get ``load_state_dict``, plain
    values are put back where they were. The saving and the loading group may differ in size and
    in placements. Every chunk is checked against its digest.

    ``strict`` raises one MismatchError that lists every missing, unexpected and mismatched tensor,
    and leaves the state untouched; ``strict=False`` loads the rest. ``cast=True`` converts dtypes.
    What is damaged or missing is rebuilt from parity, where the step has it, or read from the first of ``tiers`` (other
    roots that hold copies of the run's steps) that has it right, and told in ``LoadReport.repaired``. When nothing has
    it, ``step="latest"`` falls back to the newest older step that verifies and says why in
    ``LoadReport.skipped``; a step asked for by number never does.

    Storage that gives nothing for ``progress_timeout_s`` is given up: StoreError, on the other ranks RankError.
    A rank that is dead or stopped gives RankError on the others, naming it; the process group then still works.

    Raises NotFoundError, MismatchError, DamagedError (the message says so when part of the state
    was filled already), UnsupportedFormatError.
    """
    if step != "latest" and (isinstance(step, bool) or not isinstance(step, int)):
        raise BadInputError(f"step={step!r}: expected a step number or 'latest'")
    number = None if step == "latest" else int(step)
    positive(progress_timeout_s, "progress_timeout_s")
    return load_with(
        session_of(run),
        state,
        step=number,
        strict=strict,
        cast=cast,
        tiers=tiers,
        progress_timeout_s=progress_timeout_s,
    )


def load_with(
    session: Session,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    cast: bool = False,
    optional: Collection[str] = (),
    tiers: Sequence[Url] = (),
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
) -> LoadReport:
    """``load`` by a session (None: the latest); top-level entries in ``optional`` may be missing from the step."""
    session.begin("the load" if step is None else f"the load of step {step}", progress_timeout_s)
    run = tiered(session.run, tiers, lambda store: BoundedStore(store, progress_timeout_s, session.ranks.sign))
    _wait_for_saves(session)
    skipped: list[Skipped] = []
    spoiled = False
    while True:
        try:
            with contextlib.ExitStack() as holding:  # rank 0's, for all of them
                choose = functools.partial(_choose, run, step, skipped, holding)
                skipped[:], found = session.ranks.from_first(choose)
                report = _load_step(
                    session.ranks,
                    run,
                    state,
                    found,
                    tuple(skipped),
                    strict=strict,
                    cast=cast,
                    optional=optional,
                    progress_timeout_s=progress_timeout_s,
                )
        except _BadStepError as error:
            spoiled = spoiled or error.spoiled
            worse = session.ranks.from_first(functools.partial(_as_told, run, found.attempt, str(error)))
            if step is None:
                skipped.append(Skipped(found.attempt.step, found.attempt.label, str(worse)))
                continue
            raise _told_spoiled(worse, spoiled) from None
        except CkptError as error:
            raise _told_spoiled(error, spoiled) from None
        session.loaded(found.attempt.step)
        return report


def _told_spoiled(error: CkptError, spoiled: bool) -> CkptError:
    if not spoiled:
        return error
    if SPOILED in str(error):
        return error
    met = "the damage was met" if isinstance(error, DamagedError) else "that"
    told = error_from_kind(type(error).__name__, f"{error}; part of the state was filled before {met}{SPOILED}")
    told.exit_code = error.exit_code
    return told


def _wait_for_saves(session: Session) -> None:
    """A save of ours that is under way may become the latest step; so may one that a dead job staged."""
    for pending in session.saves.pending:
        if pending.done:
            continue
        try:
            pending.result()
        except CkptError:
            pending.told = False  # the next save raises it: a load is not where it belongs
    session.ranks.all_or_none(lambda: settle(session.run.url, SETTLE_TIMEOUT_S))


def _as_told(run: Run, attempt: Attempt, damage: str) -> CkptError:
    """The error for a step that could not be read to its end: damage, unless someone has deleted it meanwhile."""
    try:
        run.read_commit(attempt)
    except NotFoundError:
        return NotFoundError(f"{run.url}: step {attempt.step} ({attempt.label}) was deleted meanwhile: {damage}")
    except CkptError:
        pass  # the first damage says more
    return DamagedError(damage)


def _choose(
    run: Run, step: int | None, skipped: Sequence[Skipped], holding: contextlib.ExitStack
) -> tuple[list[Skipped], StepState]:
    """(what was passed over, the step to load), which is held until ``holding`` is closed."""
    passed: list[Skipped] = []

    def find() -> StepState:
        passed[:], found = _candidate(run, step, skipped)
        return found

    found = holding.enter_context(run.holding(find))
    return passed, found


def _candidate(run: Run, step: int | None, skipped: Sequence[Skipped]) -> tuple[list[Skipped], StepState]:
    if step is not None:
        return list(skipped), run.find(step)
    run.require()
    passed = list(skipped)
    known = {skip.attempt for skip in skipped}
    for state in run.live_steps():
        if state.attempt.label in known:
            continue
        if state.commit is not None:
            return passed, state
        if state.state == "unsupported":  # not damage: the step may be whole, and going back behind it would lose it
            raise UnsupportedFormatError(state.why)
        if state.state != "incomplete":
            passed.append(Skipped(state.attempt.step, state.attempt.label, state.why))
    reasons = "; ".join(f"step {skip.step} ({skip.attempt}): {skip.why}" for skip in passed)
    if passed:
        raise DamagedError(f"{run.url}: no step is usable: {reasons}")
    raise NotFoundError(f"{run.url}: no committed step yet")


def _load_step(
    ranks: Ranks,
    run: Run,
    state: Mapping[str, Any],
    found: StepState,
    skipped: tuple[Skipped, ...],
    *,
    strict: bool,
    cast: bool,
    optional: Collection[str],
    progress_timeout_s: float,
) -> LoadReport:
    assert found.commit is not None
    reader = StepReader(run, found.attempt, found.commit)

    def look() -> tuple[LoadTarget, tuple[list[str], bool]]:
        stored = stored_state(reader, ranks.rank, ranks.world)
        target = wanted(state, stored, rank=ranks.rank, world=ranks.world, strict=False, cast=cast)
        fits = not target.mismatched and all(name in optional for name in target.missing)
        return target, (target.unexpected, fits)

    def fill() -> tuple[int, list[str]]:
        nbytes = fill_tensors(
            reader,
            target.reads,
            neighbours=_neighbours(ranks),
            progress_timeout_s=progress_timeout_s,
            sign=ranks.sign,
        )
        return nbytes, repaired_texts(reader.repaired())

    # No rank's state is touched before all ranks know that what they will read fits.
    target, everyone = _of_all(ranks, look, filling=False)
    missing = tuple(target.missing)
    target.missing = [name for name in missing if name not in optional]
    common = set.intersection(*(set(unexpected) for unexpected, _ in everyone))
    target.unexpected = [name for name in target.unexpected if name in common]
    if strict and (common or not all(fits for _, fits in everyone)):  # the same on all ranks
        ranks.all_or_none(target.refuse_misfits)
    try:
        nbytes, repaired = _of_all(ranks, fill, filling=True)
    except CkptError as error:
        raise _told_spoiled(error, spoiled=True) from error
    ranks.all_or_none(target.apply)
    return LoadReport(
        step=found.attempt.step,
        attempt=found.attempt.label,
        missing=missing,
        unexpected=tuple(target.unexpected),
        mismatched=tuple(str(mismatch) for mismatch in target.mismatched),
        ignored=tuple(target.ignored),
        skipped=skipped,
        bytes_read=nbytes,
        repaired=tuple(dict.fromkeys(text for texts in repaired for text in texts)),
    )


def _of_all(ranks: Ranks, act: Callable[[], tuple[Result, Told]], *, filling: bool) -> tuple[Result, list[Told]]:
    """``act()`` on every rank: this rank's own result, and what each tells the others, in rank order.

    Damage that any rank finds is raised on every rank, so that all fall back together.
    """

    def attempt() -> tuple[Result | None, tuple[str | None, Told | None]]:
        try:
            result, told = act()
        except DamagedError as error:
            return None, (str(error), None)
        return result, (None, told)

    result, everyone = ranks.exchange(attempt)
    for rank, (damage, _) in enumerate(everyone):
        if damage is not None:
            raise _BadStepError(damage if ranks.world == 1 else f"rank {rank}: {damage}", spoiled=filling)
    return typing.cast("Result", result), [told for _, told in everyone]


def _neighbours(ranks: Ranks) -> int:
    """How many ranks there are on this node; all of them where the launcher does not say."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(told), ranks.world) if told.isdecimal() else ranks.world


def stored_state(reader: StepReader, rank: int | None, world: int) -> StoredState:
    """What a step holds, as the state room wants it, for the rank that reads it (None: for no rank in particular)."""
    tensors = {name: StoredTensor(t.dtype, t.shape, t.kind) for name, t in reader.tensors().items()}
    shared: dict[str, Any] = {"tensors": tensors, "aliases": reader.aliases(), "values": reader.values()}
    if rank is not None and reader.commit.world == world:
        return StoredState(**shared, rank_values=reader.rank_values(rank), rank_tensors=_own_tensors(reader, rank))
    return StoredState(
        **shared,
        all_rank_values=_EachRank(reader.commit.world, reader.rank_values),
        all_rank_tensors=_EachRank(reader.commit.world, lambda saved: _own_tensors(reader, saved)),
    )


class _EachRank(Sequence[Any]):
    """What each saved rank has of its own, read when it is asked for: few states need it, and ranks can be many."""

    def __init__(self, world: int, look: Callable[[int], Any]) -> None:
        self._ranks = range(world)
        self._look = functools.cache(look)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: Any) -> Any:
        return self._look(self._ranks[rank])


def _own_tensors(reader: StepReader, rank: int) -> dict[str, StoredTensor]:
    return {t.name: StoredTensor(t.dtype, t.shape, t.kind) for t in reader.rank_tensors(rank)}


def fill_tensors(
    reader: StepReader,
    reads: Iterable[Read],
    *,
    neighbours: int = 1,
    progress_timeout_s: float = PROGRESS_TIMEOUT_S,
    sign: Callable[[], object] = lambda: None,
) -> int:
    """Carry out all reads; the bytes of tensors that came. ``neighbours``: ranks that load on this node.

    What is contiguous in host memory is filled in place; any other target (on a device, strided, of another dtype)
    chunk by chunk, through buffers of the threads that read.
    """
    reads = list(reads)
    fetches: list[Fetch] = []
    landings: list[TensorLanding] = []
    for read in reads:
        dest, dtype = read.dest, dtype_of(read.dtype)
        if dest.dtype == dtype:
            dest = as_integers(dest)  # torch copies those whatever their strides and device, not so every dtype
            dtype = dest.dtype
        into: memoryview | TensorLanding
        if dest.device.type == "cpu" and dest.dtype == dtype and dest.is_contiguous():
            into = memory_of(dest)
        else:
            landings.append(into := TensorLanding(dest, read.box, dtype))
        fetches.extend(reader.fetches(read.name, read.box, into, rank=read.rank, shared=neighbours >= SHARED_FROM))
    owners = [read.dest for read in reads]
    nbytes = fetch_all(reader, fetches, progress_timeout_s=progress_timeout_s, sign=sign, owners=owners)
    for landing in landings:
        landing.wait()
    return nbytes


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, of any dtype, as a writable view; the tensor must outlive it."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def say_repaired(texts: Iterable[str]) -> None:
    """Say on standard error what came from elsewhere, since the files themselves are as they were."""
    for text in texts:
        print(f"ckpt: repaired while reading (`ckpt repair` mends the file): {text}", file=sys.stderr)


def read(run: str | os.PathLike[str], *, step: int | str = "latest", tiers: Sequence[Url] = ()) -> dict[str, Any]:
    """The whole state of a step without a template: nested containers, whole CPU tensors, plain values.

    Needs no process group and is not collective. A value that was saved per rank comes as the list of
    all ranks' values. ``tiers`` are as in ``load``. Raises NotFoundError, DamagedError, UnsupportedFormatError.
    """
    opened = tiered(Run.open(run), tiers)
    with opened.reading(None if step == "latest" else int(step)) as found:
        return read_step(opened, found.attempt, _committed(found))


def read_step(run: Run, attempt: Attempt, commit: Commit) -> dict[str, Any]:
    """``read`` of one attempt."""
    reader = StepReader(run, attempt, commit)
    nbytes = sum(prod(tensor.shape) * DTYPE_NBYTES[tensor.dtype] for tensor in reader.tensors().values())
    check_room(nbytes, f"{run.url}: all tensors of step {attempt.step} together")
    tree, reads = read_tree(stored_state(reader, None, 0))
    fill_tensors(reader, reads)
    say_repaired(repaired_texts(reader.repaired()))
    return tree


def _committed(found: StepState) -> Commit:
    if found.commit is None:
        raise DamagedError(found.why)
    return found.commit


def latest(run: str | os.PathLike[str]) -> int | None:
    """The newest live step of a run, or None when there is none (or no run). Reads no payload.

    Raises UnsupportedFormatError when a newer one needs what this version does not know.
    """
    for found in Run.open(run).live_steps():
        if found.state == "unsupported":
            raise UnsupportedFormatError(found.why)
        if found.commit is not None:
            return found.attempt.step
    return None


def steps(run: str | os.PathLike[str]) -> list[int]:
    """The live steps of a run, ascending."""
    opened = Run.open(run)
    return sorted(s.attempt.step for s in opened.live_steps() if s.commit is not None)
