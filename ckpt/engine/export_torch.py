"""Restore as one torch file: the only part of ``ckpt restore`` that imports torch.

The tensors are first merged into safetensors files beside the result, and the result is written
from mappings of these, so memory stays bounded; for a moment the folder holds the bytes twice.
"""

from __future__ import annotations

import collections
import datetime as dt
import io
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt.engine.export import Destination, WholeTensor, write_group
from ckpt.errors import CkptError, DamagedError, StoreError
from ckpt.format.names import split_name
from ckpt.format.values import ModuleNode, OptimizerNode, RankRef, TensorRef
from ckpt.reading.step import Advance, StepReader
from ckpt.store.oserrors import store_error

RELEASE_NBYTES = 64 << 20  # mapped pages are let go each time that this much was written
LISTED_RANGE = 1 << 20  # a range of more items comes as (start, stop, step): it may be of any length

TensorOf = Callable[[str], torch.Tensor]


def write_torch(
    reader: StepReader, groups: Mapping[str, Sequence[WholeTensor]], target: Destination, advance: Advance
) -> None:
    """Write ``step-N.pt``: top-level key -> what was saved under it, readable by ``torch.load(weights_only=True)``.

    A module is its state dict; an optimizer is ``{"state": {parameter: ...}, "param_groups": [...]}``
    by parameter name; a value that each rank has its own of is a list, one item a rank. What
    ``weights_only`` does not let in comes as the nearest type that it does: numpy arrays as
    tensors, numpy numbers as Python's, deques and ranges as lists, frozen sets as sets, dates as ISO text.
    """
    tensors: dict[tuple[int | None, str], torch.Tensor] = {}
    mappings: list[mmap.mmap] = []
    parts = []
    for group, whole in groups.items():
        part = f"{group}.part.safetensors"
        parts.append(part)
        offsets = write_group(reader, whole, target, part, {}, advance)
        mapping = _map(os.path.join(target.path, part))
        mappings.append(mapping)
        for tensor, offset in zip(whole, offsets, strict=True):
            tensors[tensor.rank, tensor.name] = _tensor(mapping, tensor, offset)
    name = f"step-{reader.attempt.step}.pt"
    path = os.path.join(target.path, name)
    tree = _Builder(reader, tensors).tree()
    target.made(name, 0)
    target.made(name, _save(tree, path, mappings))
    for part in parts:
        target.remove(part)
        del target.files[part]
    _sync_folder(target.path)
    _check(path)


class _Builder:
    """Values and tensors put together again into what ``torch.load`` may return."""

    def __init__(self, reader: StepReader, tensors: dict[tuple[int | None, str], torch.Tensor]) -> None:
        self._reader = reader
        self._tensors = tensors
        self._aliases = reader.aliases()
        self._names = [*reader.tensors(), *self._aliases]  # in the order of the state, tied names last

    def tree(self) -> dict[str, Any]:
        own = [self._reader.rank_values(rank) for rank in range(self._reader.commit.world)]
        return {key: self._shared(value, own) for key, value in self._reader.values().items()}

    def _shared(self, value: Any, own: list[dict[str, Any]]) -> Any:
        def of_ranks(key: str) -> list[Any]:
            return [self._own(rank, values[key]) for rank, values in enumerate(own) if key in values]

        return self._convert(value, self._of_all, of_ranks)

    def _of_all(self, name: str) -> torch.Tensor:
        found = self._tensors.get((None, self._aliases.get(name, name)))
        if found is None:
            raise DamagedError(f"a value stands for the tensor {name[:200]!r}, which the step does not have")
        return found

    def _own(self, rank: int, value: Any) -> Any:
        def tensor_of(name: str) -> torch.Tensor:
            mine = self._tensors.get((rank, name))
            return self._of_all(name) if mine is None else mine

        return self._convert(value, tensor_of, lambda key: f"<rank value {key}>")

    def _convert(self, value: Any, tensor_of: TensorOf, of_ranks: Callable[[str], Any]) -> Any:
        def again(inner: Any) -> Any:
            return self._convert(inner, tensor_of, of_ranks)

        if isinstance(value, TensorRef):
            return tensor_of(value.name)
        if isinstance(value, RankRef):
            return of_ranks(value.key)
        if isinstance(value, ModuleNode):
            tensors = {_fqn(rest): tensor_of(name) for name, rest in self._below(f"{value.prefix}.")}
            return {**tensors, **{fqn: again(extra) for fqn, extra in value.extra.items()}}
        if isinstance(value, OptimizerNode):
            state: dict[str, dict[str, Any]] = {name: again(own) for name, own in value.state.items()}
            for name, rest in self._below(f"{value.prefix}.state."):
                key, _, parameter = rest.partition(".")
                state.setdefault(_fqn(parameter), {})[_fqn(key)] = tensor_of(name)
            return {"state": state, "param_groups": again(value.groups)}
        if isinstance(value, collections.Counter):
            return collections.Counter({key: again(inner) for key, inner in value.items()})
        if isinstance(value, collections.OrderedDict):
            return collections.OrderedDict((key, again(inner)) for key, inner in value.items())
        if isinstance(value, Mapping):
            return {key: again(inner) for key, inner in value.items()}
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple):
            return tuple(again(inner) for inner in value)
        if isinstance(value, range) and not value[LISTED_RANGE:]:
            return list(value)
        if isinstance(value, (list, collections.deque)):
            return [again(inner) for inner in value]
        if isinstance(value, (set, frozenset)):
            return {again(tuple(inner) if isinstance(inner, frozenset) else inner) for inner in value}
        if isinstance(value, (slice, range)):
            return (value.start, value.stop, value.step)
        if isinstance(value, dt.date):  # and datetime
            return value.isoformat()
        if isinstance(value, dt.timedelta):
            return value.total_seconds()
        if type(value).__module__ == "numpy":
            return again(value.item())
        return value

    def _below(self, prefix: str) -> Iterator[tuple[str, str]]:
        """(name, what follows the prefix) of every tensor of a module or an optimizer."""
        for name in self._names:
            if name.startswith(prefix):
                yield name, name[len(prefix) :]


def _fqn(name: str) -> str:
    """A name as torch has it: its components not escaped."""
    return ".".join(str(component) for component in split_name(name))


def _map(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _tensor(mapping: mmap.mmap, tensor: WholeTensor, offset: int) -> torch.Tensor:
    """A tensor over its mapped bytes, with its true dtype where torch can write that to a file."""
    dtype = getattr(torch, tensor.dtype, torch.uint8)
    if _is_sub_byte(tensor.dtype):  # torch.save does not know them: their bytes, then
        dtype = torch.uint8
    if tensor.nbytes == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    flat = torch.frombuffer(mapping, dtype=dtype, count=tensor.nbytes // dtype.itemsize, offset=offset)
    return flat.reshape(tensor.shape)


def _is_sub_byte(dtype: str) -> bool:
    return dtype.removeprefix("u").removeprefix("int") in {"1", "2", "3", "4", "5", "6", "7"}


class _ReleasingFile(io.FileIO):
    """A file that lets mapped pages go as they are written, and keeps the error that torch swallows."""

    def __init__(self, path: str, mappings: Sequence[mmap.mmap]) -> None:
        super().__init__(path, "xb")
        self._mappings = mappings
        self._since_release = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < view.nbytes:
                done += super().write(view[done:]) or 0
        except OSError as error:
            self.failure = error
            raise
        self._since_release += done
        if self._since_release >= RELEASE_NBYTES:
            self._since_release = 0
            for mapping in self._mappings:
                mapping.madvise(mmap.MADV_DONTNEED)
        return done


def _save(tree: Any, path: str, mappings: Sequence[mmap.mmap]) -> int:
    """Write the file durably; its size."""
    try:
        with _ReleasingFile(path, mappings) as file:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch calls some dtypes experimental
                    torch.save(tree, file)
            except (RuntimeError, OSError) as error:
                raise file.failure or error from None
            os.fsync(file.fileno())
            return file.tell()
    except OSError as error:
        raise store_error(path, error, "write", "") from None
    except RuntimeError as error:
        raise StoreError(f"{path}: torch could not write it: {str(error).splitlines()[0]}") from None


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check(path: str) -> None:
    """The file opens the way it is promised to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CkptError(f"{path}: torch.load(weights_only=True) refuses it: {str(error).splitlines()[0]}") from error
