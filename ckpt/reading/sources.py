"""Where else the bytes of a step can be had, each verified: a repair's copy, other tiers, parity.

Nothing here is touched before something was found damaged or missing, so a healthy read pays nothing for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from ckpt.errors import CkptError, DamagedError, NotFoundError
from ckpt.format.commit import COMMIT, Attempt, Commit, FileRef
from ckpt.format.parity import Parity
from ckpt.format.part import DataFile
from ckpt.reading.parity import StepParity, parity_of, rebuilt
from ckpt.reading.spans import Span
from ckpt.reading.tiers import TieredRun, with_tried
from ckpt.run import Run, check_pinned
from ckpt.store.base import Seen, Source
from ckpt.store.oserrors import is_unreadable

AGAIN = "another try"  # at reading the same object
COPY_PREFIX = "repaired-"  # of what a repair has written beside a damaged file, until that is right again
COPIES_DEEP = 2  # a repair that was stopped, and one that found its copy damaged
TOLD_EACH = 20  # of the chunks of one file that came from one place

Result = TypeVar("Result")


class Repaired(msgspec.Struct, frozen=True):
    """Something that was damaged or missing, and where its bytes came from. ``file`` is a key in the run."""

    file: str
    source: str
    tensor: str | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f": {self.tensor}"
        chunk = "" if self.chunk is None else f": chunk {self.chunk}"
        return f"{self.file}{tensor}{chunk}: from {self.source}"


def repaired_texts(repaired: Sequence[Repaired]) -> list[str]:
    """One line for each; where one place gave very many chunks of a file, the last line counts the rest."""
    by_place: dict[tuple[str, str], list[Repaired]] = {}
    for one in repaired:
        by_place.setdefault((one.file, one.source), []).append(one)
    texts: list[str] = []
    for (file, source), all_of_it in by_place.items():
        told = all_of_it if len(all_of_it) <= TOLD_EACH else all_of_it[: TOLD_EACH - 1]
        texts.extend(map(str, told))
        if len(told) < len(all_of_it):
            texts.append(f"{file}: {len(all_of_it) - len(told)} more chunks: from {source}")
    return texts


def copy_key(key: str, depth: int = 1) -> str:
    """``step-00000300-w7.3/repaired-COMMIT`` for ``step-00000300-w7.3/COMMIT``."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{COPY_PREFIX * depth}{name}"


class Unopened(Source):
    """A file that could not be opened: every read raises why."""

    def __init__(self, error: CkptError) -> None:
        self._error = error

    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:  # noqa: ARG002 - nothing is read
        """Raise the error of the opening."""
        raise self._error

    def close(self) -> None:
        """Nothing is open."""


class Sources:
    """The places that may have the bytes of one step. Safe for several threads."""

    def __init__(self, run: Run, attempt: Attempt, commit: Commit) -> None:
        self._run, self._attempt, self._commit = run, attempt, commit
        self._lock = threading.RLock()
        self._found: tuple[list[Run], list[str]] | None = None
        self._parity = StepParity(commit, self._parity_record)
        self._made: dict[Repaired, None] = {}  # in the order in which it was found
        if isinstance(run, TieredRun) and attempt in run.commits_from:
            self.note(Repaired(run.key(attempt, COMMIT), run.commits_from[attempt]))

    def repaired(self) -> list[Repaired]:
        """What came from elsewhere so far."""
        with self._lock:
            return list(self._made)

    def note(self, repaired: Repaired) -> None:
        """Remember that something came from elsewhere."""
        with self._lock:
            self._made[repaired] = None

    def tiers(self) -> tuple[list[Run], list[str]]:
        """The tiers that have this very step, and why each of the others has not."""
        with self._lock:
            if self._found is None:
                good: list[Run] = []
                refused: list[str] = []
                for tier in self._run.tiers if isinstance(self._run, TieredRun) else ():
                    try:
                        if tier.read_commit(self._attempt) == self._commit:
                            good.append(tier)
                        else:
                            refused.append(f"{tier.url}: its COMMIT of {self._attempt.folder} is another one")
                    except NotFoundError:
                        refused.append(f"{tier.url}: has no {self._attempt.folder}")
                    except CkptError as error:
                        refused.append(str(error))
                self._found = good, refused
            return self._found

    # -- small objects ---------------------------------------------------------------------

    def small(
        self, key: str, check: Callable[[bytes, str], Result], limit_nbytes: int, error: CkptError
    ) -> tuple[Result, str]:
        """``check(bytes, where)`` of an object that was not right here, and where it came from.

        ``check`` raises DamagedError for bytes that are not the right ones. Raises ``error``, with what was tried.
        """
        tried = list(self.tiers()[1])

        def read(run: Run, place: str) -> Result:
            return check(run.store.get(place, limit_nbytes=limit_nbytes), f"{run.url}/{place}")

        found = self._elsewhere(key, error, tried, read)
        if found is None:
            raise with_tried(error, tried) from error.__cause__
        self.note(Repaired(key, found[1]))
        return found

    def _elsewhere(
        self, key: str, error: CkptError, tried: list[str], read: Callable[[Run, str], Result]
    ) -> tuple[Result, str] | None:
        """What ``read(run, key)`` gives of the first copy that is right, and where that is; ``tried`` gets the others.

        ``error`` is what was wrong here.
        """
        for source, run, place in (*self._again(key, error), *self._copies(key)):
            try:
                return read(run, place), source
            except NotFoundError:
                if run is not self._run:
                    tried.append(f"{run.url}/{place}: not there")
            except CkptError as failure:
                if source != AGAIN:  # it says the same once more
                    tried.append(str(failure))
        return None

    def pinned(self, ref: FileRef, error: CkptError) -> tuple[bytes, str]:
        """``small`` of a file that COMMIT pins."""

        def check(raw: bytes, where: str) -> bytes:
            check_pinned(raw, ref.nbytes, ref.digest, where)
            return raw

        return self.small(self._run.key(self._attempt, ref.name), check, ref.nbytes, error)

    def _again(self, key: str, error: CkptError) -> list[tuple[str, Run, str]]:
        """A read that the system refused is tried once more: one that hiccups must not cost a step."""
        return [(AGAIN, self._run, key)] if is_unreadable(error) else []

    def _copies(self, key: str) -> Iterator[tuple[str, Run, str]]:
        for depth in range(1, COPIES_DEEP + 1):
            yield copy_key(key, depth).rpartition("/")[2], self._run, copy_key(key, depth)
        for tier in self.tiers()[0]:
            yield tier.url, tier, key

    def _parity_record(self, ref: FileRef) -> Parity:
        key = self._run.key(self._attempt, ref.name)
        try:
            raw = self._run.pinned_file(self._attempt, ref.name, ref.nbytes, ref.digest)
        except CkptError as error:
            raw, _ = self.pinned(ref, error)
        return parity_of(self._commit, ref, raw, f"{self._run.url}/{key}")

    # -- data files ------------------------------------------------------------------------

    def span(self, name: str, span: Span, error: CkptError) -> tuple[bytearray, memoryview, str]:
        """(stored bytes, raw bytes, where from) of a span that was not right here.

        Raises ``error``, with what was tried.
        """
        key = self._run.key(self._attempt, name)
        tried: list[str] = list(self.tiers()[1])

        def read(run: Run, place: str) -> tuple[bytearray, memoryview | bytes | bytearray]:
            stored = bytearray(span.nbytes)
            run.store.read_into(place, span.offset, memoryview(stored))
            return stored, span.decoded(stored, f"{run.url}/{place}: {span.what}")

        found = self._elsewhere(key, error, tried, read)
        if found is not None:
            (stored, raw), source = found
            return self._taken(key, span, source, stored, raw)
        try:
            parity = self._parity.covering(name)
            if parity is not None:
                stored = rebuilt(parity, name, span.offset, span.nbytes, self.read_anywhere)
                try:
                    raw = span.decoded(stored, parity.name)
                except DamagedError as failure:
                    tried.append(f"{failure}, so {parity.name} or another of its files is damaged there too")
                else:
                    return self._taken(key, span, parity.name, stored, raw)
        except CkptError as failure:
            tried.append(f"parity: {failure}")
        raise with_tried(error, tried) from error.__cause__

    def size(self, file: DataFile, error: CkptError) -> str:
        """Who has a data file at its right size that has another one here. Raises ``error``, with what was tried."""
        key = self._run.key(self._attempt, file.name)
        tried: list[str] = list(self.tiers()[1])
        source = None
        for name, run, place in self._copies(key):
            try:
                if run.store.size(place) == file.nbytes:
                    source = name
                    break
            except CkptError as failure:
                if run is not self._run:
                    tried.append(str(failure))
        if source is None:
            try:
                parity = self._parity.covering(file.name)
                source = None if parity is None else parity.name
            except CkptError as failure:
                tried.append(f"parity: {failure}")
        if source is None:
            raise with_tried(error, tried) from error.__cause__
        self.note(Repaired(key, source))
        return source

    def _taken(
        self, key: str, span: Span, source: str, stored: bytearray, raw: memoryview | bytes | bytearray
    ) -> tuple[bytearray, memoryview, str]:
        self.note(Repaired(key, source, span.tensor, span.chunk))
        return stored, memoryview(raw), source

    def read_anywhere(self, name: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from a file of the step, here or wherever it can be read; what comes is not verified."""
        key = self._run.key(self._attempt, name)
        try:
            self._run.store.read_into(key, offset, view)
        except CkptError as error:
            for _, run, place in self._copies(key):
                try:
                    run.store.read_into(place, offset, view)
                except CkptError:
                    continue
                return
            if isinstance(error, NotFoundError):
                raise DamagedError(f"{self._run.url}/{key}: missing, and needed for it") from None
            raise
