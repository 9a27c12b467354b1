"""The coordinator's last act: check that all parts belong together, create COMMIT, then apply retention."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import ckpt
from ckpt.errors import AlreadyExistsError, CkptError, DamagedError, SaveFailedError
from ckpt.format import records
from ckpt.format.commit import HF_INDEX, Attempt, Commit, FileRef, LayoutRef
from ckpt.format.part import decode_part
from ckpt.keeper.parity import read_parity
from ckpt.keeper.persist import attempt_of
from ckpt.keeper.protocol import LayoutTask, SaveTask
from ckpt.keeper.saves import SeenPart, see
from ckpt.plan.live import to_delete
from ckpt.run import Run

PART_LIMIT_NBYTES = 1 << 30

_GROUP = "group:"  # keys whose values may differ between layouts


def read_part(run: Run, attempt: Attempt, world: int, rank: int, name: str) -> SeenPart:
    """Another node's part. DamagedError for one that is not of this attempt and rank."""
    key = run.key(attempt, name)
    raw = run.store.get(key, limit_nbytes=PART_LIMIT_NBYTES)
    part = decode_part(raw, f"{run.url}/{key}")
    found = (part.step, part.attempt, part.world, part.rank)
    expected = (attempt.step, attempt.label, world, rank)
    if found != expected:
        raise DamagedError(f"{run.url}/{key}: (step, attempt, world, rank) is {found}, expected {expected}")
    return see(part, FileRef(name, len(raw), records.digest(raw)))


def check_agreement(parts: Sequence[SeenPart], layouts: Sequence[LayoutTask]) -> None:
    """Refuse parts that do not make one state: ranks in rank order, each with its layout, values that agree.

    Raises SaveFailedError that names the value and the two ranks.
    """
    planned = {rank: layout.digest for layout in layouts for rank in _expand(layout.ranks)}
    first_of_layout: dict[str, SeenPart] = {}
    first_of_key: dict[str, SeenPart] = {}
    for part in parts:
        if part.layout != planned.get(part.rank):
            raise SaveFailedError(
                f"rank {part.rank} has layout {part.layout}, rank 0 planned {planned.get(part.rank)} for it: "
                "the ranks disagree on the structure of the state"
            )
        first = first_of_layout.setdefault(part.layout, part)
        for key in sorted({*first.values_digests, *part.values_digests}):
            _check_equal(key, first, part)
        if first is part:
            for key in sorted(part.values_digests):
                if not key.startswith(_GROUP):
                    _check_equal(key, first_of_key.setdefault(key, part), part)


def _check_equal(key: str, first: SeenPart, other: SeenPart) -> None:
    if first.values_digests.get(key) != other.values_digests.get(key):
        raise SaveFailedError(
            f"state[{key.removeprefix(_GROUP)!r}]: rank {first.rank} and rank {other.rank} have different values; "
            "make them equal, or declare the value with ckpt.per_rank(...) so that each rank's own is kept"
        )


def create_commit(
    run: Run, task: SaveTask, parts: Sequence[SeenPart], keys: list[str], parities: Mapping[int, FileRef]
) -> None:
    """Make the step exist; ``task`` is rank 0's, ``parities`` are those written here by their lowest ranks.

    ``keys`` gets what is written beside COMMIT.

    Raises what ``Run.commit`` raises.
    """
    attempt = attempt_of(task)
    files = []
    if task.hf_index is not None:
        keys.append(run.key(attempt, HF_INDEX))
        try:
            run.store.create(keys[-1], task.hf_index)
        except AlreadyExistsError:
            keys.pop()
            raise
        files.append(FileRef(HF_INDEX, len(task.hf_index), records.digest(task.hf_index)))
    files += [parities.get(low) or read_parity(run, attempt, task.world, low) for low in task.parity_groups]
    commit = Commit(
        format=records.FORMAT,
        step=task.step,
        attempt=attempt.label,
        world=task.world,
        features=("zstd",) if any(part.encoded for part in parts) else (),
        written_by=f"ckpt {ckpt.__version__}",
        created_unix_s=time.time(),
        layouts=tuple(LayoutRef(layout.digest, len(layout.raw), layout.ranks) for layout in task.layouts),
        parts=tuple(part.ref for part in parts),
        files=tuple(files),
    )
    run.commit(attempt, commit, [(layout.digest, layout.raw) for layout in task.layouts])


def retain(run: Run, attempt: Attempt, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Delete what the policy lets go, now that ``attempt`` is committed; what went wrong, in sentences."""
    warnings: list[str] = []
    if keep_last is None:
        return warnings
    try:
        gone = to_delete(run.survey().states, keep_last, keep_every)
    except CkptError as error:
        return [f"retention: nothing was deleted, the run cannot be surveyed: {error}"]
    for old in gone:
        if old != attempt:
            with _collected(warnings, f"retention: step {old.step} ({old.label}) was not deleted"):
                run.delete_attempt(old)
    return warnings


@contextlib.contextmanager
def _collected(warnings: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except CkptError as error:
        warnings.append(f"{what}: {error}")


def _expand(ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last + 1)
