"""The bytes of data files and XOR files, compared span by span; and for each span that is wrong, who has it right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ckpt.errors import CkptError, DamagedError, NotFoundError, StoreError
from ckpt.format.chunk import CHUNK_NBYTES, RAW
from ckpt.format.parity import Parity
from ckpt.format.safetensors import parse_header
from ckpt.reading.checks import header_problems
from ckpt.reading.remake import data_span, xor_span
from ckpt.reading.report import Problem, Progress
from ckpt.reading.shards import FileShards
from ckpt.reading.spans import Span, file_spans, plain_spans
from ckpt.reading.step import StepReader

OWN_BYTES = "its own bytes"  # a file that only has too many

Elsewhere = Callable[[Span, CkptError], tuple[bytes | bytearray, str]]  # a span's stored bytes, and where from


class FileVerifier:
    """Reads whole files of one step, and appends to ``problems``; ``total`` is the bytes that progress counts to."""

    def __init__(self, reader: StepReader, problems: list[Problem], progress: Progress | None) -> None:
        self._reader, self._problems, self._progress = reader, problems, progress
        self.files = self.bytes_read = self.total = self._done = 0
        self._window = bytearray()

    def check_data(self, shards: FileShards) -> None:
        """One data file: its size, its header and every chunk."""
        header = self._check(
            _Checked(
                shards.file.name,
                shards.file.nbytes,
                list(file_spans(shards)),
                "its part",
                lambda span, wrong: data_span(self._reader, shards, span, wrong),
            )
        )
        if header is None or shards.file.encoding != RAW:
            return
        key = self._key(shards.file.name)
        try:
            _, stored = parse_header(header, shards.file.nbytes, "header")
        except DamagedError as error:
            self._problems.append(Problem(key, str(error)))
            return
        self._problems.extend(Problem(key, what, tensor) for tensor, what in header_problems(stored, shards))

    def check_xor(self, parity: Parity) -> None:
        """One XOR file, against its record."""
        if parity.members:
            spans = list(plain_spans(parity.nbytes, parity.chunks))
            self._check(
                _Checked(
                    parity.name,
                    parity.nbytes,
                    spans,
                    "its record",
                    lambda span, wrong: xor_span(self._reader, parity, span, wrong),
                )
            )

    def _key(self, name: str) -> str:
        return self._reader.run.key(self._reader.attempt, name)

    def _check(self, file: _Checked) -> bytes | None:
        """Every span of a file; gives the first one's bytes when they are right."""
        key = self._key(file.name)
        first = len(self._problems)
        try:
            size = self._reader.run.store.size(key)
        except CkptError as error:
            what = "missing, though COMMIT needs it" if isinstance(error, NotFoundError) else _bare(error, self._reader)
            self._problems.append(Problem(key, what, repair=self._whole(file)))
            self._advance(file.nbytes)
            return None
        self.files += 1
        if size != file.nbytes:
            self._problems.append(Problem(key, f"{size} bytes, {file.said_by} says {file.nbytes}"))
        head = None
        for batch in _batches(file.spans):
            for span, stored in self._read(file, batch, size):
                wrong = stored if isinstance(stored, str) else _wrong(span, stored)
                if wrong is not None:
                    wrong = wrong.replace("its part says", f"{file.said_by} says")
                    wrong = wrong if span.chunk is not None else f"header: {wrong}"
                    self._problems.append(Problem(key, wrong, span.tensor, span.chunk, self._repair(file, span)))
                elif span is file.spans[0] and not isinstance(stored, str):
                    head = bytes(stored)
        if size != file.nbytes:
            self._problems[first] = self._sized(first)
        return head

    def _read(self, file: _Checked, batch: list[Span], size: int) -> Iterator[tuple[Span, memoryview | str]]:
        """The spans with their stored bytes, or why these cannot be read; neighbours are read at once."""
        start, end = batch[0].offset, batch[-1].offset + batch[-1].nbytes
        if end - start > len(self._window):
            self._window = bytearray(end - start)
        view = memoryview(self._window)[: end - start]
        why = None
        if end > size:
            why = f"the file ends before its {end - start} bytes"
        else:
            try:
                self._reader.run.store.read_into(self._key(file.name), start, view)
            except (DamagedError, StoreError) as error:
                why = _bare(error, self._reader)
        if why is not None and len(batch) > 1:  # what is left of it is still looked at, span by span
            for span in batch:
                yield from self._read(file, [span], size)
            return
        if why is None:
            self.bytes_read += end - start
        self._advance(end - start)
        for span in batch:
            yield span, why or view[span.offset - start : span.offset - start + span.nbytes]

    def _repair(self, file: _Checked, span: Span) -> str | None:
        """Who has the span right."""
        try:
            return file.elsewhere(span, DamagedError(span.what))[1]
        except CkptError:
            return None

    def _whole(self, file: _Checked) -> str | None:
        """Who has a file that is not there: all that are needed for it, or None."""
        found: dict[str, None] = {}
        for span in file.spans:
            source = self._repair(file, span)
            if source is None:
                return None
            found[source] = None
        return ", ".join(found) or OWN_BYTES

    def _sized(self, place: int) -> Problem:
        """The problem of a wrong size: repaired with the file's other problems, or by its own bytes."""
        problem, others = self._problems[place], self._problems[place + 1 :]
        if any(other.repair is None for other in others):
            return problem
        repair = ", ".join(dict.fromkeys(str(other.repair) for other in others)) or OWN_BYTES
        return Problem(problem.file, problem.what, repair=repair)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(min(self._done, self.total), self.total)


class _Checked(NamedTuple):
    """A file to check: what it should be, who says so, and who may have a span that is not right here."""

    name: str
    nbytes: int
    spans: Sequence[Span]
    said_by: str
    elsewhere: Elsewhere


def _wrong(span: Span, stored: memoryview) -> str | None:
    """What is wrong with a span's stored bytes, or None."""
    try:
        span.decoded(stored, "")
    except DamagedError as error:
        return str(error).removeprefix(": ")
    return None


def _bare(error: CkptError, reader: StepReader) -> str:
    """A store's message without the place that it starts with: a Problem has it already."""
    prefix = f"{reader.run.url}/{reader.attempt.folder}/"
    text = str(error)
    return text[len(prefix) :].partition(": ")[2] if text.startswith(prefix) else text


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans in file order, joined to reads of at most the largest chunk's size."""
    batch: list[Span] = []
    for span in spans:
        if batch and span.offset + span.nbytes - batch[0].offset > CHUNK_NBYTES:
            yield batch
            batch = []
        batch.append(span)
    if batch:
        yield batch
