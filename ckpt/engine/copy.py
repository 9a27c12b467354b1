"""Copying committed steps from one store to another: the same attempts, byte for byte.

Everything that COMMIT pins is read once, compared with its digests on the way, and written; the writers' records go
first, COMMIT last, so a copy that is stopped at any point leaves at its target what a reader understands, and going on
finds what is there already. Memory is bounded by a chunk, or by the largest record.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import unquote

import msgspec

from ckpt.errors import AlreadyExistsError, BadInputError, CkptError, DamagedError, NotFoundError, StoreError
from ckpt.format.chunk import CHUNK_NBYTES
from ckpt.format.commit import COMMIT, FileRef, decode_commit
from ckpt.format.layout import decode_layout, layout_key
from ckpt.format.parity import parse_record_name
from ckpt.format.part import Part
from ckpt.format.writer import writer_key
from ckpt.holds import holding
from ckpt.plan.live import LIVE
from ckpt.reading.parity import parity_of
from ckpt.reading.report import Problem
from ckpt.reading.spans import Span, file_spans, plain_spans
from ckpt.reading.step import StepReader
from ckpt.reading.verifier import without_place
from ckpt.run import COMMIT_LIMIT_NBYTES, LAYOUT_LIMIT_NBYTES, WRITER_LIMIT_NBYTES, Run, StepState, as_damage, part_of
from ckpt.store.base import Source

COPIED = "copied"
THERE = "already there"
DAMAGED = "damaged"  # at the source; nothing was committed at the target

Progress = Callable[[int, int], None]  # bytes dealt with, bytes in all


class CopiedStep(msgspec.Struct, frozen=True):
    """What became of one step. Bytes and files that the target had already count as skipped."""

    step: int
    attempt: str
    outcome: str  # COPIED, THERE or DAMAGED
    files: int = 0
    nbytes: int = 0
    skipped_files: int = 0
    skipped_nbytes: int = 0


class CopyReport(msgspec.Struct, frozen=True):
    """What a copy did. ``skipped`` are newer attempts that are no steps (damaged, unknown feature), and why."""

    run: str  # the source
    target: str
    steps: tuple[CopiedStep, ...]
    writers: int  # records that the target did not have
    problems: tuple[Problem, ...]  # of the source: which file, tensor and chunk is not what was saved
    skipped: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every step that was asked for is at the target now."""
        return not self.problems


def copy_steps(
    source: str | os.PathLike[str] | Run,
    target: str | os.PathLike[str] | Run,
    *,
    step: int | None = None,
    every_step: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy the latest step, step ``step``, or all live steps, to another root; what is whole there is not copied again.

    A step that is committed at the target already is left as it is, and not read again. A step with damage is not
    committed at the target; the report names the damage, and other steps are copied all the same.

    Raises NotFoundError without such a step, BadInputError for a target that is another run, no run, or inside the
    source, DamagedError for an unreadable writer's record, StoreError.
    """
    opened, other = (run if isinstance(run, Run) else Run.open(run) for run in (source, target))
    _refuse_same_place(opened.url, other.url)
    opened.require()
    states, skipped = _chosen(opened, step, every_step=every_step)
    with contextlib.suppress(NotFoundError):
        other.require()
    copying = _Copying(opened, other, progress)
    writers = copying.copy_writers()
    steps = copying.copy_steps(states)
    return CopyReport(opened.url, other.url, tuple(steps), writers, tuple(copying.problems), tuple(skipped))


def _refuse_same_place(source: str, target: str) -> None:
    here, there = _place(source), _place(target)
    if there == here:
        raise BadInputError(f"{target}: source and target are the same place")
    if there.startswith(f"{here}/"):
        raise BadInputError(f"{target}: lies inside the source, {source}; copy to a place of its own")


def _place(url: str) -> str:
    """A text that is equal for two names of one place, as far as names tell."""
    for local in ("fsspec+file://", "fsspec+local://"):
        if url.startswith(local):
            return os.path.realpath(unquote(url.removeprefix(local)))
    return url.removeprefix("fsspec+").rstrip("/") if "://" in url else os.path.realpath(url)


def _chosen(run: Run, step: int | None, *, every_step: bool) -> tuple[list[StepState], list[str]]:
    """The steps to copy, ascending, and what was passed over."""
    if every_step:
        states = run.survey().steps
        live = [state for state in states if state.state == LIVE]
        passed = [state for state in states if state.state in {"damaged", "unsupported"}]
    elif step is not None:
        live, passed = [run.find(step)], []
    else:
        live, passed = [run.find()], []
        for state in run.live_steps():
            if state.attempt <= live[0].attempt:
                break
            if state.state != "incomplete":
                passed.append(state)
    if not live:
        run.find()  # says why there is none
    return live, [f"{state.attempt.folder} is {state.state} ({state.why})" for state in passed]


class _Wrong(Exception):  # noqa: N818 - ends a file whose damage has been noted
    """A file of the source is not what was saved."""


class _Copying:
    """One copy under way; its counters are those of the step at hand."""

    def __init__(self, source: Run, target: Run, progress: Progress | None) -> None:
        self.source, self.target = source, target
        self.problems: list[Problem] = []
        self._progress = progress
        self._done = self._total = 0
        self._window = memoryview(mmap.mmap(-1, CHUNK_NBYTES))  # page-aligned, so that O_DIRECT takes it
        self._files = self._nbytes = self._skipped_files = self._skipped_nbytes = 0

    # -- writers ---------------------------------------------------------------------------

    def copy_writers(self) -> int:
        """Create, ascending, the records that the target lacks; how many. BadInputError when it is another run."""
        lacking, common = [], 0
        for writer in self.source.writers():
            key = writer_key(writer.number)
            raw = self.source.store.get(key, limit_nbytes=WRITER_LIMIT_NBYTES)
            found = self._at_target(key, WRITER_LIMIT_NBYTES)
            if found is not None and found != raw and raw.startswith(found):
                self.target.store.delete(key)  # torn, by a copy that was stopped where nothing is created whole
                found = None
            if found is None:
                lacking.append((key, raw))
            elif self.target.writer(writer.number) == writer:
                common += 1
            else:
                raise BadInputError(
                    f"{self.target.url}: is another run: its writer {writer.number} is not the one of "
                    f"{self.source.url}; give an empty place, or a copy of the same run"
                )
        if not common and self.target.writers():
            raise BadInputError(
                f"{self.target.url}: is another run: it has no writer in common with {self.source.url}; "
                "give an empty place, or a copy of the same run"
            )
        for key, raw in lacking:
            self._create(key, raw)
        return len(lacking)

    # -- steps -----------------------------------------------------------------------------

    def copy_steps(self, states: Sequence[StepState]) -> list[CopiedStep]:
        """One after the other, ascending; a step with damage does not keep the others back."""
        if self._progress is not None:
            self._total = sum(_nbytes(StepReader.of(self.source, state)) for state in states)
        return [self._copy_step(state) for state in states]

    def _copy_step(self, state: StepState) -> CopiedStep:
        attempt = state.attempt
        key = self.source.key(attempt, COMMIT)
        self._files = self._nbytes = self._skipped_files = self._skipped_nbytes = 0
        with holding(self.source.store, attempt):
            try:
                raw = self.source.store.get(key, limit_nbytes=COMMIT_LIMIT_NBYTES)
            except NotFoundError:
                raise self._deleted(state) from None
            commit = decode_commit(raw, f"{self.source.url}/{key}")
            if self._is_committed(key, raw):
                self._pass(_nbytes(StepReader(self.source, attempt, commit)) if self._progress is not None else 0)
                return CopiedStep(attempt.step, attempt.label, THERE)
            before = len(self.problems)
            sizes = self._copy_files(StepReader(self.source, attempt, commit))
            if len(self.problems) > before:
                if not self.source.store.exists(key):
                    del self.problems[before:]
                    raise self._deleted(state)
                return self._copied(state, DAMAGED)
        for name, nbytes in sizes.items():
            if self.target.store.size(self.target.key(attempt, name)) != nbytes:
                where = f"{self.target.url}/{self.target.key(attempt, name)}"
                raise StoreError(f"{where}: has changed since it was copied; is another copy under way? Copy again")
        self._create(key, raw)
        self.target.await_listed(attempt)
        return self._copied(state, COPIED)

    def _copied(self, state: StepState, outcome: str) -> CopiedStep:
        counts = (self._files, self._nbytes, self._skipped_files, self._skipped_nbytes)
        return CopiedStep(state.attempt.step, state.attempt.label, outcome, *counts)

    def _deleted(self, state: StepState) -> NotFoundError:
        return NotFoundError(
            f"{self.source.url}: step {state.attempt.step} ({state.attempt.label}) was deleted while it was copied; "
            "copy again to have what is there now"
        )

    def _is_committed(self, key: str, raw: bytes) -> bool:
        """Whether the target has this COMMIT; one that is torn is removed, another one is an error."""
        found = self._at_target(key, COMMIT_LIMIT_NBYTES)
        if found is None or found == raw:
            return found is not None
        where = f"{self.target.url}/{key}"
        try:
            decode_commit(found, where)
        except DamagedError:
            self.target.store.delete(key)
            return False
        raise BadInputError(f"{where}: another COMMIT than that of {self.source.url}; nothing was copied over it")

    def _copy_files(self, reader: StepReader) -> dict[str, int]:
        """All that COMMIT pins, each rank's data before its part; name -> bytes of what is at the target now."""
        sizes: dict[str, int] = {}
        for layout in reader.commit.layouts:
            with self._noted(reader, layout_key(layout.digest)):
                self._copy_layout(layout.digest)
        for rank, ref in enumerate(reader.commit.parts):
            with self._noted(reader, reader.run.key(reader.attempt, ref.name)):
                raw, part = self._part(reader, rank)
                for shards in reader.files(part):
                    sizes[shards.file.name] = shards.file.nbytes
                    self._copy_data(reader, shards.file.name, shards.file.nbytes, list(file_spans(shards)))
                sizes[ref.name] = ref.nbytes
                self._put(reader, ref.name, raw)
        for ref in reader.commit.files:
            with self._noted(reader, reader.run.key(reader.attempt, ref.name)):
                raw = self._pinned(reader, ref)
                if parse_record_name(ref.name) is not None:
                    parity = parity_of(reader.commit, ref, raw, reader.where(ref.name))
                    if parity.members:
                        spans = list(plain_spans(parity.nbytes, parity.chunks))
                        sizes[parity.name] = parity.nbytes
                        self._copy_data(reader, parity.name, parity.nbytes, spans)
                sizes[ref.name] = ref.nbytes
                self._put(reader, ref.name, raw)
        return sizes

    @contextlib.contextmanager
    def _noted(self, reader: StepReader, key: str) -> Iterator[None]:
        """What is damaged or missing at the source is noted with its place, and the next file looked at."""
        try:
            yield
        except DamagedError as error:
            self.problems.append(Problem(key, without_place(self.source, reader.attempt.folder, str(error))))

    def _copy_layout(self, digest: str) -> None:
        key = layout_key(digest)
        try:
            raw = self.source.store.get(key, limit_nbytes=LAYOUT_LIMIT_NBYTES)
        except NotFoundError:
            raise DamagedError("missing, though COMMIT needs it") from None
        except StoreError as error:
            raise as_damage(error) from error.__cause__
        decode_layout(raw, digest)
        self.target.create_layout(digest, raw)
        self._pass(len(raw))

    def _part(self, reader: StepReader, rank: int) -> tuple[bytes, Part]:
        ref = reader.commit.parts[rank]
        raw = self._pinned(reader, ref)
        part = part_of(reader.commit, rank, raw, reader.where(ref.name))
        if part.layout != reader.rank_layout(rank):
            raise DamagedError(f"names the layout {part.layout}, COMMIT says {reader.rank_layout(rank)}")
        return raw, part

    def _pinned(self, reader: StepReader, ref: FileRef) -> bytes:
        return self.source.pinned_file(reader.attempt, ref.name, ref.nbytes, ref.digest)

    def _put(self, reader: StepReader, name: str, raw: bytes) -> None:
        """A small file, unless the target has it; another one in its place is debris, for there is no COMMIT yet."""
        key = self.target.key(reader.attempt, name)
        found = self._at_target(key, len(raw))
        if found == raw:
            self._count(len(raw), skipped=True)
            return
        if found is not None or self.target.store.exists(key):
            self.target.store.delete(key)
        self.target.store.create(key, raw)
        self._count(len(raw))

    # -- data files ------------------------------------------------------------------------

    def _copy_data(self, reader: StepReader, name: str, nbytes: int, spans: Sequence[Span]) -> None:
        """A large file, span by span; its damage is noted here, and leaves nothing of it at the target."""
        key = reader.run.key(reader.attempt, name)
        if self._is_whole(key, nbytes, spans):
            self._count(nbytes, skipped=True)
            return
        self.target.store.delete(key)
        before = len(self.problems)
        try:
            found = self.source.store.size(key)
        except NotFoundError:
            self.problems.append(Problem(key, "missing, though COMMIT needs it"))
            return
        if found != nbytes:
            self.problems.append(Problem(key, f"{found} bytes, its part says {nbytes}"))
        with self.source.store.open_source(key) as source, contextlib.suppress(_Wrong):
            with self.target.store.open_sink(key, nbytes) as sink:
                for span in spans:
                    view = self._read(source, key, span)
                    if view is not None and len(self.problems) == before:
                        sink.write(view)
                if len(self.problems) > before:
                    raise _Wrong
            self._count(nbytes, passed=False)

    def _read(self, source: Source, key: str, span: Span) -> memoryview | None:
        """A span's stored bytes, verified; None for one that is damaged, which is noted."""
        view = self._room(span.nbytes)
        where = f"{self.source.url}/{key}"
        try:
            try:
                source.read_into(span.offset, view)
            except StoreError as error:
                raise as_damage(error) from error.__cause__
            span.decoded(view, where)
        except DamagedError as error:
            what = str(error).removeprefix(f"{where}: ")
            self.problems.append(Problem(key, what, span.tensor, span.chunk))
            return None
        finally:
            self._pass(span.nbytes)
        return view

    def _is_whole(self, key: str, nbytes: int, spans: Sequence[Span]) -> bool:
        """Whether the target has the file with every byte right."""
        try:
            if self.target.store.size(key) != nbytes:
                return False
            with self.target.store.open_source(key) as source:
                for span in spans:
                    view = self._room(span.nbytes)
                    source.read_into(span.offset, view)
                    span.decoded(view, key)
        except (NotFoundError, DamagedError):
            return False
        return True

    def _room(self, nbytes: int) -> memoryview:
        if nbytes > self._window.nbytes:  # a header, of 100 MB at most
            self._window = memoryview(mmap.mmap(-1, nbytes))
        return self._window[:nbytes]

    # -- the target's small objects, and counting --------------------------------------------

    def _at_target(self, key: str, limit_nbytes: int) -> bytes | None:
        """The object there; None when absent or larger than what is to be there."""
        try:
            if self.target.store.size(key) > limit_nbytes:
                return None
            return self.target.store.get(key, limit_nbytes=limit_nbytes)
        except NotFoundError:
            return None

    def _create(self, key: str, raw: bytes) -> None:
        """Create an object that another copy of the same run may create at the same time."""
        try:
            self.target.store.create(key, raw)
        except AlreadyExistsError:
            if self._at_target(key, len(raw)) != raw:
                raise

    def _count(self, nbytes: int, *, skipped: bool = False, passed: bool = True) -> None:
        if skipped:
            self._skipped_files += 1
            self._skipped_nbytes += nbytes
        else:
            self._files += 1
            self._nbytes += nbytes
        if passed:
            self._pass(nbytes)

    def _pass(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)


def _nbytes(reader: StepReader) -> int:
    """How much a step makes to copy; 0 for a part that cannot be read, which is told when it is copied."""
    commit = reader.commit
    nbytes = sum(ref.nbytes for ref in commit.layouts) + sum(ref.nbytes for ref in (*commit.parts, *commit.files))
    for rank in range(commit.world):
        with contextlib.suppress(CkptError):
            nbytes += sum(file.nbytes for file in reader.run.part(reader.attempt, commit, rank).files)
    return nbytes
