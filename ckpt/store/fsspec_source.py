"""An object of an fsspec file system being read, range by range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.errors import BadInputError, DamagedError
from ckpt.store.base import Seen, Source
from ckpt.store.oserrors import quantity

if TYPE_CHECKING:
    from ckpt.store.fsspec import FsspecStore

PIECE_NBYTES = 4 << 20


class FsspecSource(Source):
    """Ranges of one object, each asked for by itself."""

    def __init__(self, store: FsspecStore, key: str, nbytes: int) -> None:
        self._store, self._key, self._nbytes = store, key, nbytes

    def read_into(self, offset: int, view: memoryview, seen: Seen | None = None) -> None:
        """Fill ``view``, by requests of 4 MiB at most: that much memory, beside the view's, one read takes."""
        where = self._store.where(self._key)
        if offset < 0 or view.readonly or not view.c_contiguous:
            raise BadInputError(f"{where}: read_into takes an offset of 0 or more and a writable, contiguous view")
        end = offset + view.nbytes
        at, ends_at = offset, self._nbytes
        target = view.cast("B") if view.nbytes else view
        while at < end <= ends_at:
            piece = target[at - offset : at - offset + PIECE_NBYTES]
            found = self._request(at, at + len(piece))
            if len(found) != len(piece):
                ends_at = at + len(found)
                break
            piece[:] = found
            if seen is not None:
                seen(piece)
            at += len(piece)
        if end > ends_at:
            raise DamagedError(
                f"{where}: ends after {quantity(ends_at)}, but bytes {offset:,} to {end:,} are expected in it"
            )

    def _request(self, start: int, end: int) -> bytes:
        path = self._store.path(self._key)
        found: bytes = self._store.ask(
            self._key, "read", lambda: self._store.filesystem.cat_file(path, start=start, end=end)
        )
        return found

    def close(self) -> None:
        """Nothing is held."""
