"""Any file system that fsspec knows as a store: ``sftp://``, ``memory://``, ``fsspec+s3://`` and others.

Nothing here needs a descriptor or a sync: an object counts when its file was closed without an error and a fresh look
at its key gives the size that was written. No listing is taken from a cache, and whether a key exists is asked of the
key. What a file system cannot do (create only if absent) is found out by trying, before the first object is made.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ckpt.errors import AlreadyExistsError, BadInputError, CkptError, NotFoundError, StoreError
from ckpt.store.base import Sink, Source, Store
from ckpt.store.fsspec_sink import FsspecSink, Held, OpenFile, write_all
from ckpt.store.fsspec_source import FsspecSource
from ckpt.store.keys import check_key, check_prefix, is_component
from ckpt.store.oserrors import oversized, quantity, store_error
from ckpt.store.retry import RETRY_TIMEOUT_S, is_transient, retry

T = TypeVar("T")

PREFIX = "fsspec+"  # in front of a scheme that another store takes by itself
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"}  # have no folders; making one would make a bucket
_BLOCK_NBYTES = 16 << 20  # what a file collects before it sends it
_MOST_BLOCKS = 5000  # half of what S3 allows for one object
_LOOKS = 10  # at a folder that is to be deleted and is not empty

# How an object is made only where there is none.
_LINK = "link"  # under another name, then linked: local files
_PUT = "put"  # by the storage itself, on request
_EXCLUSIVE = "exclusive"  # by a file opened for exclusive creation
_CHECKED = "checked"  # looked for, written, read again and compared

_log = logging.getLogger("ckpt.store")
_ways: dict[str, str] = {}  # URL -> one of the above; what this process has found out
_finding_out = threading.Lock()
_locks = [threading.Lock() for _ in range(64)]  # so that of this process's threads only one makes a key


class FsspecStore(Store):
    """Keys are paths below ``root`` of an fsspec file system, of which it has an instance of its own.

    Transient errors (time-outs, resets, busy servers) are retried for ``retry_timeout_s``, but for those of a sink's
    bytes: those fail the object. Where the file system cannot create an object only if it is absent, two processes that
    make the same key at the same moment may both succeed: then only one job may write to a run, which is said once.
    """

    lists_at_once = False

    def __init__(self, url: str, *, retry_timeout_s: float = RETRY_TIMEOUT_S) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self.retry_timeout_s = retry_timeout_s
        self.filesystem, self.root = _open_filesystem(self.url, retry_timeout_s)
        classes = {cls.__name__ for cls in type(self.filesystem).__mro__}
        self.in_memory = "MemoryFileSystem" in classes
        self._is_local = "LocalFileSystem" in classes
        protocols = self.filesystem.protocol
        buckets = _BUCKETS.intersection([protocols] if isinstance(protocols, str) else protocols)
        self._has_folders = not self.in_memory and not buckets
        kind = None
        with contextlib.suppress(Exception):  # unreachable, or not allowed: each verb says so
            kind = self.filesystem.info(self.root)["type"]
        if kind == "file":
            raise BadInputError(f"{self.url}: is a file; expected a folder, or nothing yet")

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    # -- reading -----------------------------------------------------------------------------

    def get(self, key: str, *, limit_nbytes: int | None = None) -> bytes:
        """The whole object."""
        nbytes = self.size(key)
        if limit_nbytes is not None and nbytes > limit_nbytes:
            raise oversized(self.where(key), nbytes, limit_nbytes)
        return bytes(self.ask(key, "read", lambda: self.filesystem.cat_file(self.path(key))))

    def open_source(self, key: str, *, shared: bool = False) -> Source:  # noqa: ARG002 - nothing is kept between reads
        """Each read is a request of its own; the size is asked for once, here."""
        return FsspecSource(self, key, self.size(key))

    def size(self, key: str) -> int:
        """The object's size, as the storage says it now."""
        nbytes = self.look(key)
        if nbytes is None:
            raise NotFoundError(f"{self.where(key)}: not there")
        return nbytes

    def list(self, prefix: str = "") -> builtins.list[str]:
        """Names that a key may have, from a listing that was just made. It may still lag behind the keys."""
        check_prefix(prefix)
        return sorted({name for name, _ in self._entries(prefix, "list") if is_component(name)})

    # -- writing -----------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> None:
        """By the best way that the file system has; looked at again before this returns."""
        check_key(key)
        way, path, tries = self._way(), self.path(key), 0

        def put() -> None:
            nonlocal tries
            if tries:  # the answer to an earlier try was lost; what it asked for may have been done
                found = self._stored(key)
                if found == data:
                    return
                if found is not None and not data.startswith(found):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                self._remove(path)
            tries += 1
            self._in_folder(path, lambda: self._put(way, path, data))

        with self.lock(key):
            if self.look(key) is not None:
                raise self.taken(key)
            try:
                self.ask(key, "write", put, f"in an object of {quantity(len(data))}")
                self.check_size(key, len(data))
            except AlreadyExistsError:
                if tries < 2 or self._stored(key) != data:
                    raise
            except CkptError:
                with contextlib.suppress(CkptError):
                    found = self._stored(key)
                    if found is not None and data.startswith(found):  # ours, whole or torn
                        self.delete(key)
                raise
            if way == _CHECKED and self._stored(key) != data:
                raise self.taken(key)

    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """A file of the file system; where that shows it only when it is closed, AlreadyExistsError may come then."""
        check_key(key)
        self._way()
        path = self.path(key)
        with self.lock(key):
            if self.look(key) is not None:
                raise self.taken(key)
            if self.in_memory:
                return FsspecSink(self, key, nbytes, Held(lambda data: self._put(_PUT, path, data)), grows=False)
            block_nbytes = max(_BLOCK_NBYTES, (nbytes or 0) // _MOST_BLOCKS)
            file = self.ask(key, "write", lambda: self._in_folder(path, lambda: self._open(path, block_nbytes)))
            return FsspecSink(self, key, nbytes, file, grows=self.look(key) is not None, synced=self._is_local)

    def delete(self, key: str) -> None:
        """Remove the object; a folder of that name is none."""
        check_key(key)
        if self.look(key) is not None:
            self.ask(key, "delete", lambda: self._remove(self.path(key)))

    def delete_folder(self, prefix: str) -> None:
        """One object after the other, those that the listing shows."""
        check_key(prefix)
        for left in reversed(range(_LOOKS)):
            self._delete_objects(prefix)
            try:
                self._remove_tree(prefix)
            except StoreError as error:
                # Whoever deletes or writes at the same time can make a listing miss what is still there.
                if not left or getattr(error.__cause__, "errno", None) not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
            else:
                return

    def _delete_objects(self, prefix: str) -> None:
        for name, is_folder in self._entries(prefix, "delete"):
            below = f"{prefix}/{name}"
            if not is_folder:
                self.ask(below, "delete", partial(self._remove, self.path(below)))
            elif is_component(name):
                self.delete_folder(below)
            else:
                self._remove_tree(below)

    # -- what sources and sinks ask ------------------------------------------------------------

    def where(self, key: str) -> str:
        """URL and key, for messages."""
        return f"{self.url}/{key}" if key else self.url

    def path(self, key: str) -> str:
        """The file system's own path of a key."""
        return f"{self.root.rstrip('/')}/{key}" if key else self.root

    def taken(self, key: str) -> AlreadyExistsError:
        """The error for a key that exists."""
        return AlreadyExistsError(f"{self.where(key)}: exists already, and objects are never replaced")

    def lock(self, key: str) -> threading.Lock:
        """What a thread of this process holds while it makes the key."""
        return _locks[hash((self.root, key)) % len(_locks)]

    def look(self, key: str) -> int | None:
        """The size of the object under the key, asked anew; None when there is definitely none."""
        check_key(key)
        path = self.path(key)

        def look() -> dict[str, Any] | None:
            self.filesystem.invalidate_cache()
            try:
                found: dict[str, Any] = self.filesystem.info(path)
            except (FileNotFoundError, NotADirectoryError):  # below a file there is nothing either
                return None
            return found

        found = self.ask(key, "read", look)
        if found is None or found["type"] == "directory":
            return None
        if found.get("islink"):
            link = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            raise self.error(key, link, "read") from link
        if found["type"] != "file" or found.get("size") is None:
            raise StoreError(f"{self.where(key)}: neither a file of known size nor a folder; remove it")
        return int(found["size"])

    def check_size(self, key: str, nbytes: int) -> None:
        """StoreError unless the object under the key has ``nbytes`` bytes."""
        found = self.look(key)
        if found != nbytes:
            what = "it is not there" if found is None else f"it has {quantity(found)}"
            raise StoreError(
                f"{self.where(key)}: {quantity(nbytes)} were written and the file was closed without an error, but "
                f"{what}; check the storage; earlier steps are untouched"
            )

    def ask(self, key: str, doing: str, call: Callable[[], T], progress: str = "") -> T:
        """What ``call`` gives, tried again while its errors are transient; else ckpt's error, from that one."""
        try:
            return retry(call, self.retry_timeout_s, self._is_transient)
        except CkptError:
            raise
        except Exception as error:
            raise self.error(key, error, doing, progress) from error

    def error(self, key: str, error: Exception, doing: str, progress: str = "") -> CkptError:
        """The error to raise from what a file system raised."""
        if not isinstance(error, OSError):
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            return StoreError(f"{self.where(key)}: cannot {doing}: {said}; see the cause")
        if isinstance(error, PermissionError) and error.errno is None:  # a server's answer; a disk's has its number
            said = str(error) or "permission denied"
            return StoreError(f"{self.where(key)}: cannot {doing}: permission denied ({said}); check the credentials")
        return store_error(self.where(key), error, doing, progress)

    # -- the file system -----------------------------------------------------------------------

    def _is_transient(self, error: BaseException) -> bool:
        # In memory two threads may meet in one dict.
        return is_transient(error) or (self.in_memory and isinstance(error, (KeyError, RuntimeError)))

    def _entries(self, prefix: str, doing: str) -> builtins.list[tuple[str, bool]]:
        """(name, whether a folder) of all that a fresh listing shows under ``prefix``."""
        path = self.path(prefix)

        def listed() -> builtins.list[dict[str, Any]]:
            self.filesystem.invalidate_cache()
            try:
                entries: builtins.list[dict[str, Any]] = self.filesystem.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return entries

        entries = []
        for entry in self.ask(prefix, doing, listed):
            above, _, name = entry["name"].rstrip("/").rpartition("/")
            if above.strip("/") == path.strip("/") and name:  # else it is the object, or the folder, itself
                entries.append((name, entry["type"] == "directory"))
        return entries

    def _stored(self, key: str) -> bytes | None:
        try:
            return self.get(key)
        except NotFoundError:
            return None

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.filesystem.rm_file(path)

    def _remove_tree(self, prefix: str) -> None:
        """Remove a folder with what a key cannot name, where the file system has folders at all."""
        if not self._has_folders:
            return
        path = self.path(prefix)

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if self.filesystem.info(path)["type"] != "directory":
                    return
                if self._is_local:
                    self.filesystem.rm(path, recursive=True)
                else:
                    self.filesystem.rmdir(path)

        self.ask(prefix, "delete", remove)

    def _in_folder(self, path: str, call: Callable[[], T]) -> T:
        """What ``call`` gives; the folder that it misses is made."""
        try:
            return call()
        except FileNotFoundError:
            if not self._has_folders:
                raise
            self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        return call()

    def _open(self, path: str, block_nbytes: int) -> OpenFile:
        """A new file; exclusive where the file system knows that mode."""
        if _ways[self.url] != _CHECKED:
            with contextlib.suppress(ValueError, NotImplementedError, TypeError):
                exclusive: OpenFile = self.filesystem.open(path, "xb", block_size=block_nbytes)
                return exclusive
        file: OpenFile = self.filesystem.open(path, "wb", block_size=block_nbytes)
        return file

    def _put(self, way: str, path: str, data: bytes) -> None:
        """Make an object in one go."""
        if way == _LINK:
            beside = f"{path.rpartition('/')[0]}/.{secrets.token_hex(8)}"
            try:
                write_all(self.filesystem.open(beside, "xb"), data, grows=lambda: True, synced=True)
                self.filesystem.link(beside, path)
            finally:
                self._remove(beside)
        elif way == _PUT:
            self.filesystem.pipe_file(path, data, mode="create")
        elif way == _CHECKED and _overrides(self.filesystem, "pipe_file"):
            self.filesystem.pipe_file(path, data)
        else:
            file = self.filesystem.open(path, "xb" if way == _EXCLUSIVE else "wb")
            write_all(file, data, grows=lambda: self._is_seen(path))

    def _is_seen(self, path: str) -> bool:
        """Whether something is there, as far as can be told after an error."""
        try:
            self.filesystem.invalidate_cache()
            self.filesystem.info(path)
        except Exception:  # noqa: BLE001 - the error that is told is the one before
            return False
        return True

    def _way(self) -> str:
        """How objects are created only if absent, found out once per process by making a small one twice."""
        with _finding_out:
            if self.url not in _ways:
                _ways[self.url] = self._find_way()
            return _ways[self.url]

    def _find_way(self) -> str:
        if self._is_local:
            return _LINK
        if _overrides(self.filesystem, "pipe_file") and self._creates_only(_PUT):
            return _PUT
        if self._creates_only(_EXCLUSIVE):
            return _EXCLUSIVE
        _log.warning(
            "%s: this file system cannot create an object only if it is absent; only one job at a time may write to "
            "this run (a second one is noticed when it has written, not before)",
            self.url,
        )
        return _CHECKED

    def _creates_only(self, way: str) -> bool:
        """Whether the second try at making the same object is refused."""
        name = f".{secrets.token_hex(8)}"
        path = self.path(name)

        def twice() -> bool:
            try:
                self._in_folder(path, lambda: self._put(way, path, b"1"))
                self._put(way, path, b"2")
            except FileExistsError:
                return bool(self.filesystem.info(path)["size"] == 1)
            except OSError:
                raise
            except Exception:  # noqa: BLE001 - a file system that lacks the mode says so in its own way
                return False
            return False

        try:
            return self.ask("", "write", twice)
        finally:
            with contextlib.suppress(CkptError):
                self.ask("", "delete", lambda: self._remove(path))


def _open_filesystem(url: str, retry_timeout_s: float) -> tuple[Any, str]:
    """(an instance of its own, without a cache of listings; the root's path in it) for a URL."""
    address = url.removeprefix(PREFIX)
    scheme, _, rest = address.partition("://")
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        shown = f"{scheme}://…@{address.rpartition('@')[2]}"
        raise BadInputError(
            f"{shown}: a password in a URL ends up in logs; use a key, or fsspec's own configuration "
            "(~/.config/fsspec, see its documentation)"
        )
    fsspec = importlib.import_module("fsspec")
    try:
        cls = fsspec.get_filesystem_class(scheme)
        options = cls._get_kwargs_from_urls(address)  # as fsspec's own url_to_fs asks it
        filesystem = retry(lambda: cls(skip_instance_cache=True, **options), retry_timeout_s)  # some connect here
    except (ValueError, ImportError) as error:
        raise BadInputError(f"{url}: fsspec cannot open it: {error}") from error
    except Exception as error:
        raise StoreError(f"{url}: cannot be reached: {type(error).__name__}: {error}") from error
    cache = getattr(filesystem, "dircache", None)
    if cache is not None:
        cache.use_listings_cache = False
    return filesystem, str(cls._strip_protocol(address))


def _overrides(filesystem: Any, name: str) -> bool:
    """Whether the file system's class has a method of its own, plain or asynchronous, and not only fsspec's default."""
    classes = [cls for cls in type(filesystem).__mro__ if cls.__module__ not in {"fsspec.spec", "fsspec.asyn"}]
    return any(method in vars(cls) for cls in classes for method in (name, f"_{name}"))
