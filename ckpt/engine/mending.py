"""Writing one object anew where a damaged one stands, so that being cut short at any point loses nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt.errors import AlreadyExistsError, CkptError, DamagedError, NotFoundError, StoreError
from ckpt.format.layout import decode_layout, layout_key
from ckpt.format.parity import Parity
from ckpt.format.writer import WRITERS, decode_writer, parse_writer_name, writer_key
from ckpt.reading.parity import parity_of, parity_refs
from ckpt.reading.remake import data_span, remade, xor_span
from ckpt.reading.report import Progress
from ckpt.reading.shards import FileShards
from ckpt.reading.sources import COPIES_DEEP, COPY_PREFIX, Repaired, copy_key
from ckpt.reading.spans import Span, file_spans, plain_spans
from ckpt.reading.step import StepReader
from ckpt.reading.tiers import TieredRun, with_tried
from ckpt.reading.verify_files import OWN_BYTES, Elsewhere
from ckpt.run import LAYOUT_LIMIT_NBYTES, WRITER_LIMIT_NBYTES, Run
from ckpt.store.base import Store


class Mender:
    """Mends the files of one step, each by its key."""

    def __init__(self, reader: StepReader, progress: Progress | None = None) -> None:
        self._reader, self._progress = reader, progress
        self._run, self._store = reader.run, reader.run.store

    def mend(self, key: str) -> str:
        """Put the object right, durable; where its bytes came from.

        DamagedError when nothing has them, StoreError when they cannot be written.
        """
        reader, wrong = self._reader, DamagedError(f"{self._run.url}/{key}: damaged")
        for layout in reader.commit.layouts:
            if key == layout_key(layout.digest):
                return self._mend_layout(key, layout.digest, wrong)
        name = key.removeprefix(f"{reader.attempt.folder}/")
        for ref in (*reader.commit.parts, *reader.commit.files):
            if name == ref.name:
                raw, source = remade(reader, ref, wrong)
                self.put_small(key, raw)
                return source
        for _, ref in parity_refs(reader.commit):
            if name == ref.name.removesuffix("json") + "xor":
                raw, _ = self._pinned(ref.name)
                return self._mend_xor(key, parity_of(reader.commit, ref, raw, reader.where(ref.name)))
        for rank in range(reader.commit.world):
            for shards in reader.files(reader.part(rank)):
                if name == shards.file.name:
                    return self._mend_data(key, shards)
        raise DamagedError(f"{self._run.url}/{key}: not a file of this step")

    def _pinned(self, name: str) -> tuple[bytes, str]:
        ref = next(ref for ref in self._reader.commit.files if ref.name == name)
        try:
            return self._run.pinned_file(self._reader.attempt, ref.name, ref.nbytes, ref.digest), ""
        except CkptError as error:
            return remade(self._reader, ref, error)

    def _mend_layout(self, key: str, digest: str, wrong: DamagedError) -> str:
        def check(raw: bytes, _where: str) -> bytes:
            decode_layout(raw, digest)
            return raw

        raw, source = self._reader.sources.small(key, check, LAYOUT_LIMIT_NBYTES, wrong)
        self.put_small(key, raw)
        return source

    def _mend_data(self, key: str, shards: FileShards) -> str:
        spans = list(file_spans(shards))
        return self._put_large(
            key, shards.file.nbytes, spans, lambda span, error: data_span(self._reader, shards, span, error)
        )

    def _mend_xor(self, key: str, parity: Parity) -> str:
        spans = list(plain_spans(parity.nbytes, parity.chunks))
        return self._put_large(
            key, parity.nbytes, spans, lambda span, error: xor_span(self._reader, parity, span, error)
        )

    # -- writing ---------------------------------------------------------------------------

    def put_small(self, key: str, raw: bytes) -> None:
        """Have exactly these bytes under ``key``, whatever stands there."""
        put_small(self._store, key, raw)

    def _put_large(self, key: str, nbytes: int, spans: list[Span], elsewhere: Elsewhere) -> str:
        """The same for a file that comes span by span; where those came from that were not right under ``key``."""
        first: dict[str, None] = {}
        again: dict[str, None] = {}
        if stands(self._store, key):
            copy = self._whole_copy(key, spans)
            if copy is None:
                copy = _free_copy(self._store, key)
                self._write(copy, nbytes, self._right_spans(key, spans, elsewhere, first))
                first = first or {OWN_BYTES: None}
            else:
                first[copy.rpartition("/")[2]] = None
            clear(self._store, key)
        self._write(key, nbytes, self._right_spans(key, spans, elsewhere, again))
        remove_copies(self._store, key)
        return ", ".join(first or again) or OWN_BYTES

    def _right_spans(
        self, key: str, spans: list[Span], elsewhere: Elsewhere, found: dict[str, None]
    ) -> Iterator[bytes | bytearray]:
        for span in spans:
            own = bytearray(span.nbytes)
            try:
                self._read(key, span, memoryview(own))
            except CkptError as error:
                stored, source = elsewhere(span, error)
                found[source] = None
                yield stored
            else:
                yield own

    def _read(self, key: str, span: Span, view: memoryview) -> None:
        self._store.read_into(key, span.offset, view)
        span.decoded(view, f"{self._run.url}/{key}: {span.what}")

    def _whole_copy(self, key: str, spans: list[Span]) -> str | None:
        """What an interrupted repair left, when all of it is right."""
        for depth in range(1, COPIES_DEEP + 1):
            copy = copy_key(key, depth)
            try:
                if self._store.size(copy) != sum(span.nbytes for span in spans):
                    continue
                for span in spans:
                    self._read(copy, span, memoryview(bytearray(span.nbytes)))
            except CkptError:
                continue
            return copy
        return None

    def _write(self, key: str, nbytes: int, pieces: Iterator[bytes | bytearray]) -> None:
        written = 0
        with self._store.open_sink(key, nbytes) as sink:
            for piece in pieces:
                sink.write(memoryview(piece))
                written += len(piece)
                if self._progress is not None:
                    self._progress(written, nbytes)

    def remove_copies(self) -> None:
        """Remove what repairs that were stopped have left of this step, which is whole."""
        folder = self._reader.attempt.folder
        for name in self._store.list(folder):
            if name.startswith(COPY_PREFIX):
                self._store.delete(f"{folder}/{name}")
        for layout in self._reader.commit.layouts:
            remove_copies(self._store, layout_key(layout.digest))


def put_small(store: Store, key: str, raw: bytes) -> None:
    """Have exactly these bytes under ``key``, by way of a copy when something else stands there."""
    if stands(store, key):
        for depth in range(1, COPIES_DEEP + 1):
            if _holds(store, copy_key(key, depth), raw):
                break
        else:
            store.create(_free_copy(store, key), raw)
        clear(store, key)
    store.create(key, raw)
    remove_copies(store, key)


def _holds(store: Store, key: str, raw: bytes) -> bool:
    try:
        return store.get(key, limit_nbytes=len(raw)) == raw
    except CkptError:
        return False


def _free_copy(store: Store, key: str) -> str:
    for depth in range(1, COPIES_DEEP + 1):
        if not stands(store, copy_key(key, depth)):
            return copy_key(key, depth)
    raise AlreadyExistsError(
        f"{store.url}/{copy_key(key, COPIES_DEEP)}: left by a repair, and damaged too; look at it and move it away"
    )


def stands(store: Store, key: str) -> bool:
    """Whether anything is under that name, an object or not."""
    folder, _, name = key.rpartition("/")
    return name in store.list(folder)


def clear(store: Store, key: str) -> None:
    """Delete whatever stands under that name. StoreError for a folder that is not empty: it is not ckpt's."""
    store.delete(key)
    if stands(store, key):
        if store.list(key):
            raise StoreError(f"{store.url}/{key}: a folder with files stands there; move it away, then repair again")
        store.delete_folder(key)


def remove_copies(store: Store, key: str) -> None:
    """Delete the copies that were made of ``key``."""
    for depth in range(COPIES_DEEP, 0, -1):
        if stands(store, copy_key(key, depth)):
            store.delete(copy_key(key, depth))


# -- writers' records ------------------------------------------------------------------------------


def mend_writers(run: Run, *, dry_run: bool) -> list[Repaired]:
    """Put back records of writers that cannot be read, or that are missing although there are attempts of theirs.

    No digest pins them: a record is taken from a tier only when all else that both have of writers is the same and
    at least one record or COMMIT is. DamagedError when one cannot be had.
    """
    done = []
    for number in sorted(_numbers(run) | {attempt.writer for attempt in Run(run.store).attempts()}):
        try:
            run.writer(number)
        except (NotFoundError, DamagedError, StoreError) as error:
            raw, source = _writer_elsewhere(run, number, error)
            if not dry_run:
                put_small(run.store, writer_key(number), raw)
            done.append(Repaired(writer_key(number), source))
    for name in run.store.list(WRITERS) if not dry_run else ():
        if name.startswith(COPY_PREFIX):
            run.store.delete(f"{WRITERS}/{name}")
    return done


def _writer_elsewhere(run: Run, number: int, error: CkptError) -> tuple[bytes, str]:
    key, tried = writer_key(number), []
    for depth in range(1, COPIES_DEEP + 1):
        copy = copy_key(key, depth)
        try:
            raw = run.store.get(copy, limit_nbytes=WRITER_LIMIT_NBYTES)
            if decode_writer(raw, f"{run.url}/{copy}").number == number:
                return raw, copy.rpartition("/")[2]
        except CkptError:
            continue
    if isinstance(run, TieredRun):
        for tier in run.tiers:
            try:
                tier.writer(number)  # it can be read there
                why = _other_run(run, tier, number)
                if why is None:
                    return tier.store.get(key, limit_nbytes=WRITER_LIMIT_NBYTES), tier.url
            except CkptError as failure:
                why = str(failure)
            tried.append(why)
    raise with_tried(error, tried) from error.__cause__


def _numbers(run: Run) -> set[int]:
    return {number for name in run.store.list(WRITERS) if (number := parse_writer_name(name)) is not None}


def _other_run(run: Run, tier: Run, number: int) -> str | None:
    """Why a tier's record of writer ``number`` is not taken; None when the tier holds copies of this very run."""
    same = 0
    for other in sorted((_numbers(tier) & _numbers(run)) - {number}):
        try:
            here = run.writer(other)
        except CkptError:  # damaged as well
            continue
        if here != tier.writer(other):
            return f"{tier.url}: its writer {other} is another one, of another run"
        same += 1
    for attempt in Run(run.store).attempts() if not same else ():
        try:
            same += attempt.writer == number and Run(run.store).read_commit(attempt) == tier.read_commit(attempt)
        except CkptError:
            continue
    return None if same else f"{tier.url}: has no writer and no COMMIT in common with {run.url}"
