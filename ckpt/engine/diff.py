"""Diff: what two steps of a run differ in, tensor by tensor and value by value. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from ckpt.format.finite import count_not_finite
from ckpt.format.layout import Tensor
from ckpt.format.part import RankTensor
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import whole_box
from ckpt.reading.alarms import step_alarms
from ckpt.reading.step import StepReader
from ckpt.reading.tree import leaves
from ckpt.run import Run

BLOCK_ELEMENTS = 1 << 20  # compared at a time: the temporary arrays stay small

Progress = Callable[[int, int], None]  # bytes read, bytes in all

_FLOATS = {"float16": "f2", "float32": "f4", "float64": "f8", "complex64": "c8", "complex128": "c16"}


class TensorChange(msgspec.Struct, frozen=True):
    """One tensor that differs. ``old`` and ``new`` are its dtype and shape, None where it is not.

    ``changed_elements`` counts elements whose bits differ; ``max_abs_difference`` is over those
    that are numbers in both steps, and None for dtypes other than floating ones. ``old_nan`` and so on count the
    elements that are no finite numbers.
    """

    name: str
    change: str  # "added", "removed", "reshaped" or "changed"
    old: str | None
    new: str | None
    elements: int = 0
    changed_elements: int | None = None
    max_abs_difference: float | None = None
    old_nan: int = 0
    old_inf: int = 0
    new_nan: int = 0
    new_inf: int = 0


class AlarmChange(msgspec.Struct, frozen=True):
    """Something that looked wrong with one step when it was saved, and not with the other."""

    change: str  # "came" or "went"
    kind: str
    tensor: str
    detail: str  # for people: counts and ranks


class ValueChange(msgspec.Struct, frozen=True):
    """One value that differs; None where it is not there."""

    path: str
    old: str | None
    new: str | None


class DiffReport(msgspec.Struct, frozen=True):
    """What two steps differ in."""

    run: str
    step_a: int
    attempt_a: str
    step_b: int
    attempt_b: str
    tensors: tuple[TensorChange, ...]
    values: tuple[ValueChange, ...]
    equal_tensors: int
    equal_values: int
    alarms: tuple[AlarmChange, ...] = ()  # of how they were saved: equal states may differ in them

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.values


def diff(run: str | os.PathLike[str] | Run, step_a: int, step_b: int, progress: Progress | None = None) -> DiffReport:
    """Compare two live steps. Tensors that are cut alike are compared by digest, and read only where these differ.

    Raises NotFoundError for a step that is not there, DamagedError for a bad chunk.
    """
    opened = run if isinstance(run, Run) else Run.open(run)
    with opened.reading(step_a) as a, opened.reading(step_b) as b:
        return _diff(StepReader.of(opened, a), StepReader.of(opened, b), progress)


def _diff(a: StepReader, b: StepReader, progress: Progress | None) -> DiffReport:
    pairs, changes = _matched(_all_tensors(a), _all_tensors(b))
    unequal = [pair for pair in pairs if not _same_digests(a, b, *pair)]
    total = 2 * sum(_nbytes(tensor) for _, _, tensor in unequal)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    for rank, name, tensor in unequal:
        change = _compare(a, b, rank, name, tensor, advance)
        if change is not None:
            changes.append(change)
    values, equal_values = _value_changes(a, b)
    return DiffReport(
        run=a.run.url,
        step_a=a.attempt.step,
        attempt_a=a.attempt.label,
        step_b=b.attempt.step,
        attempt_b=b.attempt.label,
        tensors=tuple(sorted(changes, key=lambda change: (change.change, change.name))),
        values=tuple(values),
        equal_tensors=len(pairs) - sum(change.change == "changed" for change in changes),
        equal_values=equal_values,
        alarms=tuple(_alarm_changes(a, b)),
    )


_Key = tuple[int | None, str]  # rank (None: shared), name
_Pair = tuple[int | None, str, Tensor | RankTensor]


def _all_tensors(reader: StepReader) -> dict[_Key, Tensor | RankTensor]:
    found: dict[_Key, Tensor | RankTensor] = {(None, name): tensor for name, tensor in reader.tensors().items()}
    for rank in range(reader.commit.world):
        found.update({(rank, tensor.name): tensor for tensor in reader.rank_tensors(rank)})
    return found


def _matched(
    a: Mapping[_Key, Tensor | RankTensor], b: Mapping[_Key, Tensor | RankTensor]
) -> tuple[list[_Pair], list[TensorChange]]:
    """Tensors of one dtype and shape in both, and the changes that need no reading."""
    pairs: list[_Pair] = []
    changes: list[TensorChange] = []
    for key in {**a, **b}:
        old, new = a.get(key), b.get(key)
        if old is not None and new is not None and _form(old) == _form(new):
            pairs.append((*key, old))
            continue
        change = "added" if old is None else "removed" if new is None else "reshaped"
        forms = (None if old is None else _form(old), None if new is None else _form(new))
        changes.append(TensorChange(_label(*key), change, *forms))
    return pairs, changes


def _form(tensor: Tensor | RankTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _nbytes(tensor: Tensor | RankTensor) -> int:
    return whole_box(tensor.shape).numel * DTYPE_NBYTES[tensor.dtype]


def _label(rank: int | None, name: str) -> str:
    return name if rank is None else f"rank {rank}: {name}"


def _same_digests(a: StepReader, b: StepReader, rank: int | None, name: str, tensor: Tensor | RankTensor) -> bool:
    """Whether both steps cut the tensor alike and every chunk has the same digest."""
    if not _nbytes(tensor):
        return True
    digests = [dict(_pieces(reader, rank, name)) for reader in (a, b)]
    return digests[0] == digests[1]


def _pieces(reader: StepReader, rank: int | None, name: str) -> Iterator[tuple[Any, tuple[str, ...]]]:
    for _, piece, digests in reader.chunk_digests(name, rank=rank):
        yield piece, digests


def _compare(
    a: StepReader,
    b: StepReader,
    rank: int | None,
    name: str,
    tensor: Tensor | RankTensor,
    advance: Callable[[int], None],
) -> TensorChange | None:
    """Read both and compare; None when they are equal after all (cut differently)."""
    import numpy as np

    buffers = [bytearray(_nbytes(tensor)), bytearray(_nbytes(tensor))]
    for reader, buffer in zip((a, b), buffers, strict=True):
        reader.read(name, None, memoryview(buffer), advance, rank=rank)
    itemsize = DTYPE_NBYTES[tensor.dtype]
    old, new = (np.frombuffer(buffer, np.uint8).reshape(-1, itemsize) for buffer in buffers)
    changed, largest = 0, None
    for start in range(0, len(old), BLOCK_ELEMENTS):
        block_old, block_new = old[start : start + BLOCK_ELEMENTS], new[start : start + BLOCK_ELEMENTS]
        differs = (block_old != block_new).any(axis=1)
        count = int(differs.sum())
        if not count:
            continue
        changed += count
        difference = _max_abs(np, block_old[differs], block_new[differs], tensor.dtype)
        if difference is not None:
            largest = difference if largest is None else max(largest, difference)
    if not changed:
        return None
    counts = [number for buffer in buffers for number in count_not_finite(buffer, tensor.dtype)]
    return TensorChange(
        _label(rank, name), "changed", _form(tensor), _form(tensor), len(old), changed, largest, *counts
    )


def _max_abs(np: Any, old: Any, new: Any, dtype: str) -> float | None:
    """The largest distance of elements that are numbers in both; None when there are none, or no floats."""
    if dtype == "bfloat16":  # the upper half of a float32
        old, new = ((part.copy().view("u2").astype("u4") << 16).view("f4") for part in (old, new))
    elif dtype in _FLOATS:
        old, new = (part.copy().view(_FLOATS[dtype]) for part in (old, new))
    else:
        return None
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(old.astype(wide) - new.astype(wide))
    distance = distance[~np.isnan(distance)]
    return float(distance.max()) if distance.size else None


def _alarm_changes(a: StepReader, b: StepReader) -> Iterator[AlarmChange]:
    old, new = (
        {
            (alarm.kind, alarm.tensor): alarm.detail().strip(" ()")
            for alarm in step_alarms(reader.run, reader.attempt, reader.commit)
        }
        for reader in (a, b)
    )
    for key in sorted({*old, *new}):
        if key not in old or key not in new:
            change, found = ("went", old) if key in old else ("came", new)
            yield AlarmChange(change, *key, found[key])


def _value_changes(a: StepReader, b: StepReader) -> tuple[list[ValueChange], int]:
    old, new = _leaves(a), _leaves(b)
    if a.commit.world == b.commit.world:
        for rank in range(a.commit.world):
            old.update(_rank_leaves(a, rank))
            new.update(_rank_leaves(b, rank))
    changes, equal = [], 0
    for path in {**old, **new}:
        left, right = old.get(path), new.get(path)
        if left is not None and right is not None and left[0] == right[0]:
            equal += 1
            continue
        changes.append(ValueChange(path, left and left[1], right and right[1]))
    if a.commit.world != b.commit.world and (a.rank_values(0) or b.rank_values(0)):
        changes.append(ValueChange("values of each rank", f"{a.commit.world} ranks", f"{b.commit.world} ranks"))
    return changes, equal


def _leaves(reader: StepReader) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for key, tree in reader.values(torch_types=False).items():
        found.update(leaves(tree, key))
    for other, name in reader.aliases().items():
        found.update(leaves(name, f"tied: {other}"))
    return found


def _rank_leaves(reader: StepReader, rank: int) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for key, tree in reader.rank_values(rank, torch_types=False).items():
        found.update(leaves(tree, f"rank {rank}: {key}"))
    return found
