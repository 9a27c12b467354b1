"""Restore: the shards of one step merged into whole tensors, in files that anyone's reader opens.

Memory is bounded by the largest tensor: the header of each file is written first, from the
layout's sizes, and the tensors stream behind it, each read chunk-verified into one reused buffer.
What a failure leaves behind is removed again.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Self

import msgspec

from ckpt.errors import BadInputError
from ckpt.format.records import FORMAT
from ckpt.format.safetensors import DTYPE_NBYTES, HeaderEntry, build_header, st_dtype
from ckpt.keeper.memory import check_room
from ckpt.plan.boxes import whole_box
from ckpt.plan.files import GROUPS, file_key
from ckpt.reading.step import Advance, StepReader
from ckpt.reading.tree import readable
from ckpt.run import Run
from ckpt.store import open_store
from ckpt.store.base import Store

FORMATS = ("safetensors", "torch")
VALUES_NAME = "values.json"

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class WholeTensor(msgspec.Struct, frozen=True):
    """One tensor of a restored file; ``rank`` is set for one that only that rank has."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    rank: int | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * DTYPE_NBYTES[self.dtype]


class RestoreReport(msgspec.Struct, frozen=True):
    """What was restored, and where to."""

    run: str
    step: int
    attempt: str
    dest: str
    format: str
    files: dict[str, int]  # name -> bytes
    tensors: int
    tensor_nbytes: int


def restore(
    run: str | os.PathLike[str] | Run,
    dest: str | os.PathLike[str],
    step: int | None = None,
    file_format: str = "safetensors",
    progress: Progress | None = None,
) -> RestoreReport:
    """Merge the live step of that number (None: the newest) into ``dest``, a new or empty local folder.

    ``safetensors`` gives one file per group and ``values.json``; ``torch`` one ``step-N.pt`` for
    ``torch.load(..., weights_only=True)``. Raises BadInputError for a ``dest`` that is not empty,
    StoreError when it cannot be written, DamagedError for a bad chunk; ``dest`` is then as before.
    """
    if file_format not in FORMATS:
        raise BadInputError(f"format {file_format!r}: expected one of {', '.join(FORMATS)}")
    source = run if isinstance(run, Run) else Run.open(run)
    with source.reading(step) as found, Destination(dest, source) as target:
        reader = StepReader.of(source, found)
        groups = whole_tensors(reader)
        total = sum(tensor.nbytes for group in groups.values() for tensor in group)
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        if file_format == "safetensors":
            for group, tensors in groups.items():
                write_group(reader, tensors, target, f"{group}.safetensors", _metadata(reader, tensors), advance)
            target.create(VALUES_NAME, values_json(reader))
        else:
            from ckpt.engine.export_torch import write_torch

            write_torch(reader, groups, target, advance)
        return RestoreReport(
            run=source.url,
            step=reader.attempt.step,
            attempt=reader.attempt.label,
            dest=target.path,
            format=file_format,
            files=dict(target.files),
            tensors=sum(map(len, groups.values())),
            tensor_nbytes=total,
        )


def whole_tensors(reader: StepReader) -> dict[str, list[WholeTensor]]:
    """Group -> its tensors in file order: large elements first, so that each is aligned to its own."""
    groups: dict[str, list[WholeTensor]] = {}
    for tensor in reader.tensors().values():
        key = file_key(tensor.group, tensor.name, whole_box(tensor.shape), tensor.shape)
        whole = WholeTensor(tensor.name, key, tensor.dtype, tensor.shape, tensor.kind)
        groups.setdefault(tensor.group, []).append(whole)
    for rank in range(reader.commit.world):
        for own in reader.rank_tensors(rank):
            # "[" is escaped in names, so the key can be nobody else's.
            whole = WholeTensor(own.name, f"{own.name}[rank {rank}]", own.dtype, own.shape, own.kind, rank)
            groups.setdefault("state", []).append(whole)
    for group in groups.values():
        group.sort(key=lambda tensor: -DTYPE_NBYTES[tensor.dtype])
    return {group: groups[group] for group in GROUPS if group in groups}


def write_group(
    reader: StepReader,
    tensors: Sequence[WholeTensor],
    target: Destination,
    name: str,
    metadata: dict[str, str],
    advance: Advance,
) -> list[int]:
    """Write one safetensors file of whole tensors; the offset of each in the file."""
    rows = []
    for tensor in tensors:
        dtype, shape = st_dtype(tensor.dtype, tensor.shape)
        rows.append(HeaderEntry(key=tensor.key, dtype=dtype, shape=shape, nbytes=tensor.nbytes))
    header = build_header(rows, metadata)
    offsets, offset = [], len(header)
    for tensor in tensors:
        offsets.append(offset)
        offset += tensor.nbytes
    largest = max((tensor.nbytes for tensor in tensors), default=0)
    check_room(largest, f"{reader.run.url}: the largest tensor of step {reader.attempt.step}")
    # An anonymous mapping is page-aligned: large tensors then go straight to the device.
    buffer = memoryview(mmap.mmap(-1, max(1, largest)))
    with target.store.open_sink(name, offset) as sink:
        sink.write(header)
        for tensor in tensors:
            view = buffer[: tensor.nbytes]
            reader.read(tensor.name, None, view, advance, rank=tensor.rank)
            sink.write(view)
    target.made(name, offset)
    return offsets


def values_json(reader: StepReader) -> bytes:
    """What is no tensor: as people read it, and as typed JSON, exact."""
    tensors = reader.tensors()

    def tensor_text(name: str) -> str:
        tensor = tensors.get(reader.aliases().get(name, name))
        return f"<tensor {name}>" if tensor is None else f"<tensor {name}: {tensor.dtype} {list(tensor.shape)}>"

    ranks = range(reader.commit.world)
    content = {
        "format": FORMAT,
        "run": reader.run.url,
        "step": reader.attempt.step,
        "attempt": reader.attempt.label,
        "aliases": reader.aliases(),
        "values": {k: readable(tree, tensor_text) for k, tree in reader.values(torch_types=False).items()},
        "rank_values": [
            {k: readable(tree, tensor_text) for k, tree in reader.rank_values(rank, torch_types=False).items()}
            for rank in ranks
        ],
        "typed": {
            "values": [{"rank": rank, "values": nodes} for rank, nodes in reader.value_nodes()],
            "rank_values": [reader.part(rank).rank_values for rank in ranks],
        },
    }
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


def _metadata(reader: StepReader, tensors: Sequence[WholeTensor]) -> dict[str, str]:
    """What safetensors itself cannot say: where the tensors are from, tied names, and the dtypes stored as bytes."""
    names = {tensor.name for tensor in tensors}
    aliases = {other: name for other, name in reader.aliases().items() if name in names}
    as_bytes = {
        tensor.key: f"{tensor.dtype} {list(tensor.shape)}"
        for tensor in tensors
        if tensor.dtype != "uint8" and st_dtype(tensor.dtype, tensor.shape)[0] == "U8"
    }
    metadata = {"format": "pt", "ckpt.step": str(reader.attempt.step), "ckpt.attempt": reader.attempt.label}
    for key, extra in (("ckpt.aliases", aliases), ("ckpt.stored_as_bytes", as_bytes)):
        if extra:
            metadata[key] = json.dumps(extra)
    return metadata


class Destination:
    """A new or empty local folder being filled; leaving by an exception takes everything back."""

    def __init__(self, dest: str | os.PathLike[str], run: Run) -> None:
        text = os.fspath(dest)
        if "://" in text:
            raise BadInputError(f"{text}: restore writes to a local folder; give a path")
        self.path = os.path.abspath(text)
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise BadInputError(f"{self.path}: is a file; give a new or an empty folder")
        if self.path == run.url or self.path.startswith(f"{run.url}/"):
            raise BadInputError(f"{self.path}: lies inside the run; give a folder outside of {run.url}")
        if os.path.isdir(self.path):
            found = sorted(os.listdir(self.path)) if os.access(self.path, os.R_OK) else []
            if found:
                shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
                raise BadInputError(f"{self.path}: is not empty (it holds {shown}); give a new or an empty folder")
        self.store: Store = open_store(self.path)
        self.files: dict[str, int] = {}
        self._missing = _missing_folders(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            return
        for name in self.files:
            self.remove(name)
        for folder in self._missing:  # deepest first
            try:
                os.rmdir(folder)
            except OSError:  # never made, or someone else's by now
                break

    def create(self, name: str, data: bytes) -> None:
        """A small file."""
        self.store.create(name, data)
        self.made(name, len(data))

    def made(self, name: str, nbytes: int) -> None:
        """A file was written: it is removed again if the rest fails."""
        self.files[name] = nbytes

    def remove(self, name: str) -> None:
        """A file that is not wanted after all; never raises."""
        try:
            os.unlink(os.path.join(self.path, name))
        except OSError:
            return


def _missing_folders(path: str) -> list[str]:
    """The folders that writing to ``path`` makes, deepest first."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing
