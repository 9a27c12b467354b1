"""The coordinator's last act: check that all parts belong together, and create COMMIT."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import ckpt
from ckpt.errors import AlreadyExistsError, BadInputError, DamagedError
from ckpt.format import alarms as alarms_format
from ckpt.format import records
from ckpt.format.commit import HF_INDEX, Attempt, Commit, FileRef, LayoutRef
from ckpt.format.metrics import METRICS
from ckpt.format.part import decode_part
from ckpt.keeper.parity import read_parity
from ckpt.keeper.persist import attempt_of
from ckpt.keeper.protocol import LayoutTask, SaveTask
from ckpt.keeper.saves import SeenPart, see
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

    Raises BadInputError that names the value and the two ranks.
    """
    planned = {rank: layout.digest for layout in layouts for rank in _expand(layout.ranks)}
    first_of_layout: dict[str, SeenPart] = {}
    first_of_key: dict[str, SeenPart] = {}
    for part in parts:
        if part.layout != planned.get(part.rank):
            raise BadInputError(
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
        raise BadInputError(
            f"state[{key.removeprefix(_GROUP)!r}]: rank {first.rank} and rank {other.rank} have different values; "
            "make them equal, or declare the value with ckpt.per_rank(...) so that each rank's own is kept"
        )


def create_commit(
    run: Run,
    task: SaveTask,
    parts: Sequence[SeenPart],
    keys: list[str],
    parities: Mapping[int, FileRef],
    go_on: Callable[[], None] = lambda: None,
    alarms: Sequence[alarms_format.Alarm] = (),
) -> None:
    """Make the step exist; ``task`` is rank 0's, ``parities`` are those written here by their lowest ranks.

    ``keys`` gets what is written beside COMMIT. ``go_on`` may still raise when nothing else is missing. ``alarms`` are
    those of all ranks.

    Raises what ``Run.commit`` raises.
    """
    attempt = attempt_of(task)
    files = []
    if task.hf_index is not None:
        files.append(_create(run, attempt, HF_INDEX, task.hf_index, keys))
    if task.metrics is not None:
        files.append(_create(run, attempt, METRICS, task.metrics, keys))
    if alarms:
        record = alarms_format.Alarms(records.FORMAT, task.step, attempt.label, task.world, tuple(alarms))
        files.append(_create(run, attempt, alarms_format.ALARMS, alarms_format.encode_alarms(record), keys))
    files += [parities.get(low) or read_parity(run, attempt, task.world, low) for low in task.parity_groups]
    commit = Commit(
        format=records.FORMAT,
        step=task.step,
        attempt=attempt.label,
        world=task.world,
        features=_features(parts),
        written_by=f"ckpt {ckpt.__version__}",
        created_unix_s=time.time(),
        layouts=tuple(LayoutRef(layout.digest, len(layout.raw), layout.ranks) for layout in task.layouts),
        parts=tuple(part.ref for part in parts),
        files=tuple(files),
    )
    run.commit(attempt, commit, [(layout.digest, layout.raw) for layout in task.layouts], go_on)


def _create(run: Run, attempt: Attempt, name: str, raw: bytes, keys: list[str]) -> FileRef:
    keys.append(run.key(attempt, name))
    try:
        run.store.create(keys[-1], raw)
    except AlreadyExistsError:
        keys.pop()
        raise
    return FileRef(name, len(raw), records.digest(raw))


def _features(parts: Sequence[SeenPart]) -> tuple[str, ...]:
    found = {"zstd": any(part.encoded for part in parts), alarms_format.FEATURE: any(part.has_alarms for part in parts)}
    return tuple(name for name, used in found.items() if used)


def _expand(ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last + 1)
