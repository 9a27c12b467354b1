"""Verify: every byte of a step read and compared with what COMMIT pins. Lists every problem, not the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ckpt.errors import BadInputError, CkptError, DamagedError, NotFoundError, StoreError, UnsupportedFormatError
from ckpt.format import records
from ckpt.format.chunk import CHUNK_NBYTES, RAW
from ckpt.format.commit import COMMIT, HF_INDEX, check_step
from ckpt.format.layout import layout_key
from ckpt.format.part import Part
from ckpt.format.safetensors import parse_header
from ckpt.format.values import decode, values_digest
from ckpt.plan.boxes import LayoutBoxes
from ckpt.plan.files import file_tables
from ckpt.plan.load import ChunkRead, entry_reads
from ckpt.reading.checks import header_problems, index_problems, layout_problems
from ckpt.reading.shards import FileShards, check_digest, chunk_text, part_files
from ckpt.reading.step import StepReader
from ckpt.reading.tree import without_torch
from ckpt.run import Run, StepState

Progress = Callable[[int, int], None]  # bytes read, bytes in all

# What a reader of the folder would take for a part of the step.
_LOOKS_OURS = (".safetensors", ".pack", ".index.json")


class Problem(msgspec.Struct, frozen=True):
    """One thing that is not as COMMIT pins it. ``file`` is a key in the run; ``chunk`` counts in its shard."""

    file: str
    what: str
    tensor: str | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f": {self.tensor}"
        chunk = "" if self.chunk is None else f": chunk {self.chunk}"
        return f"{self.file}{tensor}{chunk}: {self.what}"


class VerifyReport(msgspec.Struct, frozen=True):
    """What verifying one step found."""

    run: str
    step: int
    attempt: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # worth knowing, no damage
    files: int
    tensors: int
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether every byte is the one that was saved."""
        return not self.problems


def verify(
    run: str | os.PathLike[str] | Run, step: int | str = "latest", *, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte of a step and compare it with what COMMIT pins; needs no process group and no torch.

    A newer attempt whose COMMIT is torn counts as a problem of the latest step: without the damage
    it would be the latest. Raises NotFoundError when there is no such step and
    UnsupportedFormatError for a version or feature that this reader does not know.
    """
    if step != "latest" and (isinstance(step, bool) or not isinstance(step, int)):
        raise BadInputError(f"step={step!r}: expected a step number or 'latest'")
    opened = run if isinstance(run, Run) else Run.open(run)
    passed: list[StepState] = []
    try:
        found = opened.find(step if isinstance(step, int) else None)
    except (DamagedError, NotFoundError) as error:
        damaged = [s for s in _candidates(opened) if s.state == "damaged" and step in {"latest", s.attempt.step}]
        if not damaged:
            raise error from None
        return _of_damaged(opened, damaged)
    for state in _candidates(opened):
        if state.attempt == found.attempt:
            break
        if step in {"latest", state.attempt.step} and state.state in {"damaged", "unsupported"}:
            passed.append(state)
    newer = next((state for state in passed if state.state == "unsupported"), None)
    if newer is not None:
        raise UnsupportedFormatError(newer.why)
    report = verify_attempt(opened, found, progress)
    return msgspec.structs.replace(report, problems=(*_commit_problems(opened, passed), *report.problems))


def verify_all(run: str | os.PathLike[str] | Run, progress: Progress | None = None) -> Iterator[VerifyReport]:
    """Verify every committed step, live or not, oldest first; a COMMIT that cannot be read is a problem of its own."""
    opened = run if isinstance(run, Run) else Run.open(run)
    opened.require()
    for state in opened.survey().steps:
        if state.commit is not None:
            yield verify_attempt(opened, state, progress)
        elif state.state != "incomplete":
            yield _of_damaged(opened, [state])


def verify_attempt(run: Run, state: StepState, progress: Progress | None = None) -> VerifyReport:
    """Verify one committed attempt, live or not."""
    return _Verifier(StepReader.of(run, state), progress).report()


def _candidates(run: Run) -> Iterator[StepState]:
    run.require()
    return run.live_steps()


def _commit_problems(run: Run, states: Sequence[StepState]) -> list[Problem]:
    return [Problem(run.key(s.attempt, COMMIT), _without_place(run, s.attempt.folder, s.why)) for s in states]


def _of_damaged(run: Run, states: Sequence[StepState]) -> VerifyReport:
    attempt = states[0].attempt
    problems = tuple(_commit_problems(run, states))
    return VerifyReport(run.url, attempt.step, attempt.label, problems, (), 0, 0, 0)


def _without_place(run: Run, folder: str, message: str) -> str:
    """A message of a reader without the place that it starts with: a Problem has it already."""
    for prefix in (f"{run.url}/{folder}/", f"{run.url}/"):
        if message.startswith(prefix):
            return message[len(prefix) :].partition(": ")[2]
    return message


class _Verifier:
    """One step being verified. Goes on after each problem as far as what is left makes sense."""

    def __init__(self, reader: StepReader, progress: Progress | None) -> None:
        self.reader = reader
        self.run, self.attempt, self.commit = reader.run, reader.attempt, reader.commit
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._progress = progress
        self._total = self._done = self._files = self._bytes_read = 0
        self._layouts: dict[str, LayoutBoxes] = {}
        self._window = bytearray(CHUNK_NBYTES)

    def report(self) -> VerifyReport:
        self._check_layouts()
        parts = {rank: part for rank in range(self.commit.world) if (part := self._check_part(rank)) is not None}
        self._total = sum(file.nbytes for part in parts.values() for file in part.files)
        self._check_names(parts)
        tensors = self._check_tiling()
        self._check_values(parts)
        for rank, part in parts.items():
            self._check_data(rank, part)
        self._check_pinned(parts)
        return VerifyReport(
            run=self.run.url,
            step=self.attempt.step,
            attempt=self.attempt.label,
            problems=tuple(self._problems),
            notes=tuple(self._notes),
            files=self._files,
            tensors=tensors + sum(len(part.rank_tensors) for part in parts.values()),
            bytes_read=self._bytes_read,
        )

    # -- problems --------------------------------------------------------------------------

    def _problem(self, file: str, what: str, tensor: str | None = None, chunk: int | None = None) -> None:
        self._problems.append(Problem(file, what, tensor, chunk))

    def _key(self, name: str) -> str:
        return self.run.key(self.attempt, name)

    def _caught(self, file: str, error: CkptError) -> None:
        self._problem(file, _without_place(self.run, self.attempt.folder, str(error)))

    # -- records ---------------------------------------------------------------------------

    def _check_layouts(self) -> None:
        for ref in self.commit.layouts:
            key = layout_key(ref.digest)
            try:
                self._layouts[ref.digest] = self.reader.layout_boxes(ref.digest)
                size = self.run.store.size(key)
            except CkptError as error:
                self._caught(key, error)
                continue
            self._files += 1
            self._bytes_read += size
            if size != ref.nbytes:
                self._problem(key, f"{size} bytes, COMMIT says {ref.nbytes}")

    def _check_part(self, rank: int) -> Part | None:
        ref = self.commit.parts[rank]
        try:
            part = self.reader.part(rank)
        except CkptError as error:
            self._caught(self._key(ref.name), error)
            return None
        self._files += 1
        self._bytes_read += ref.nbytes
        return part

    def _check_values(self, parts: dict[int, Part]) -> None:
        first = set(self.reader.value_ranks())
        known: dict[tuple[str, str], tuple[str, int]] = {}  # (layout or "", top-level key) -> digest, rank
        for rank, part in parts.items():
            key = self._key(self.commit.parts[rank].name)
            if rank in first and part.values is None:
                self._problem(key, "has no values, though it is the first rank of its layout")
            for name, node in {**(part.values or {}), **part.rank_values}.items():
                try:
                    decode(without_torch(node), name)
                except DamagedError as error:
                    self._problem(key, f"value {error}")
            for name, node in (part.values or {}).items():
                said = part.values_digests.get(name) or part.values_digests.get(f"group:{name}")
                if said is not None and said != values_digest(node):
                    self._problem(key, f"value {name}: digest {values_digest(node)}, the same part says {said}")
            for name, digest in part.values_digests.items():
                # A module's or optimizer's values may differ between layouts, as with pipeline stages.
                scope = part.layout if name.startswith("group:") else ""
                before = known.setdefault((scope, name), (digest, rank))
                if before[0] != digest:
                    label = name.removeprefix("group:")
                    self._problem(key, f"value {label}: digest {digest}, rank {before[1]} has {before[0]}")

    def _check_names(self, parts: dict[int, Part]) -> None:
        """Every file that COMMIT needs is there, and nothing that looks like one is there besides."""
        expected = {COMMIT, *(ref.name for ref in self.commit.parts), *(ref.name for ref in self.commit.files)}
        expected |= {file.name for part in parts.values() for file in part.files}
        try:
            found = set(self.run.store.list(self.attempt.folder))
        except StoreError as error:
            self._caught(self.attempt.folder, error)
            return
        # Files that are missing are found when they are read. Without its part a file's name is not known.
        complete = len(parts) == self.commit.world
        for name in sorted(found - expected):
            if complete and (name.endswith(_LOOKS_OURS) or name.startswith("part-")):
                self._problem(self._key(name), "unexpected: COMMIT does not name it, so it is not from this save")
            else:
                self._notes.append(f"{self._key(name)}: not a file of this step, readers ignore it")

    # -- tensors ---------------------------------------------------------------------------

    def _check_tiling(self) -> int:
        """The shards of each tensor make it up exactly; how many tensors there are."""
        names: set[str] = set()
        for digest, boxes in self._layouts.items():
            names.update(tensor.name for tensor in boxes.layout.tensors)
            for tensor, what in layout_problems(boxes):
                self._problem(layout_key(digest), what, tensor)
        if len(self._layouts) == len(self.commit.layouts):
            try:
                layouts = {digest: boxes.layout for digest, boxes in self._layouts.items()}
                check_step(self.commit.layouts, self.commit.world, layouts, self.reader.where(COMMIT))
            except DamagedError as error:
                self._caught(self._key(COMMIT), error)
        return len(names)

    def _check_data(self, rank: int, part: Part) -> None:
        boxes = self._layouts.get(part.layout)
        if boxes is None:
            return  # reported already; without it nothing says what the bytes are
        key = self._key(self.commit.parts[rank].name)
        try:
            tables = file_tables(boxes.layout, rank, part.rank_tensors, boxes)
            files = part_files(part, tables, key)
        except DamagedError as error:
            self._problem(key, str(error).removeprefix(f"{key}: "))
            return
        for shards in files:
            try:
                self._check_file(rank, shards)
            except (DamagedError, StoreError) as error:
                self._caught(self._key(shards.file.name), error)

    def _check_file(self, rank: int, shards: FileShards) -> None:
        file, key = shards.file, self._key(shards.file.name)
        try:
            size = self.run.store.size(key)
        except NotFoundError:
            self._problem(key, "missing, though COMMIT needs it")
            self._advance(file.nbytes)
            return
        self._files += 1
        if size != file.nbytes:
            self._problem(key, f"{size} bytes, its part says {file.nbytes}")
        if file.encoding == RAW:
            self._check_header(shards, size)
        for batch in _batches(_chunks(rank, shards), file.encoding == RAW):
            self._check_batch(shards, batch, size)

    def _check_header(self, shards: FileShards, size: int) -> None:
        file, key = shards.file, self._key(shards.file.name)
        header = bytearray(min(file.header_nbytes, size))
        self.run.store.read_into(key, 0, memoryview(header))
        self._bytes_read += len(header)
        self._advance(len(header))
        try:
            check_digest(bytes(header), file.header_digest, "header")
            _, stored = parse_header(bytes(header), file.nbytes, "header")
        except DamagedError as error:
            self._problem(key, str(error))
            return
        for tensor, what in header_problems(stored, shards):
            self._problem(key, what, tensor)

    def _check_batch(self, shards: FileShards, batch: list[ChunkRead], size: int) -> None:
        """Chunks that lie next to each other, read at once."""
        file, key = shards.file, self._key(shards.file.name)
        start = file.header_nbytes + batch[0].offset
        nbytes = batch[-1].offset + batch[-1].nbytes - batch[0].offset
        view = memoryview(self._window)[:nbytes]
        if file.encoding != RAW:
            for chunk in batch:
                self._check_packed(shards, chunk, view)
        elif start + nbytes > size:
            # The file ends inside: what is left of it is still looked at, chunk by chunk.
            for chunk in batch:
                if len(batch) > 1:
                    self._check_batch(shards, [chunk], size)
                else:
                    self._problem(key, f"the file ends before its {chunk.nbytes} bytes", *_chunk_place(chunk))
        else:
            self.run.store.read_into(key, start, view)
            self._bytes_read += nbytes
            for chunk in batch:
                at = chunk.offset - batch[0].offset
                found = records.digest(view[at : at + chunk.nbytes])
                if found != file.chunks[chunk.index]:
                    what = f"digest {found}, its part says {file.chunks[chunk.index]}"
                    self._problem(key, what, *_chunk_place(chunk))
            self._advance(nbytes)

    def _check_packed(self, shards: FileShards, chunk: ChunkRead, view: memoryview) -> None:
        try:
            self.reader.read_chunk(shards.file, chunk.entry, chunk.index, chunk.offset, view[: chunk.nbytes])
        except (DamagedError, StoreError) as error:
            what = str(error).removeprefix(f"{self.reader.where(shards.file.name)}: ")
            what = what.removeprefix(f"{chunk_text(chunk.entry, chunk.offset)}: ")
            self._problem(self._key(shards.file.name), what, *_chunk_place(chunk))
        stored = shards.file.packed[chunk.index].nbytes
        self._bytes_read += stored
        self._advance(stored)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    # -- other files -----------------------------------------------------------------------

    def _check_pinned(self, parts: dict[int, Part]) -> None:
        for ref in self.commit.files:
            key = self._key(ref.name)
            try:
                raw = self.run.pinned_file(self.attempt, ref.name, ref.nbytes, ref.digest)
            except (CkptError, ValueError) as error:
                self._problem(key, _without_place(self.run, self.attempt.folder, str(error)))
                continue
            self._files += 1
            self._bytes_read += len(raw)
            if ref.name == HF_INDEX and len(parts) == self.commit.world:
                for tensor, what in index_problems(raw, self._model_keys(parts)):
                    self._problem(key, what, tensor)

    def _model_keys(self, parts: dict[int, Part]) -> dict[str, set[str]]:
        """Key in a model file -> the files that have it."""
        there: dict[str, set[str]] = {}
        for rank, part in parts.items():
            boxes = self._layouts.get(part.layout)
            names = {file.group: file.name for file in part.files}
            if boxes is not None and "model" in names:
                for entry in file_tables(boxes.layout, rank, (), boxes).get("model", []):
                    there.setdefault(entry.key, set()).add(names["model"])
        return there


def _chunk_place(chunk: ChunkRead) -> tuple[str, int]:
    entry = chunk.entry
    return f"{entry.name}{'' if entry.whole else entry.box}", (chunk.offset - entry.offset) // CHUNK_NBYTES


def _chunks(rank: int, shards: FileShards) -> Iterator[ChunkRead]:
    for placed in shards.shards:
        yield from entry_reads(rank, placed, placed.entry.box)


def _batches(chunks: Iterator[ChunkRead], joined: bool) -> Iterator[list[ChunkRead]]:
    """Chunks in file order, joined to reads of at most the largest chunk's size."""
    batch: list[ChunkRead] = []
    for chunk in chunks:
        full = batch and chunk.offset + chunk.nbytes - batch[0].offset > CHUNK_NBYTES
        if batch and (full or not joined):
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch
