"""A folder of a local or network file system as a store.

Writing is durable when it returns: the file is synced, then linked or already named, then its folder is
synced, and each folder that had to be made is synced into the one above it. Folders are reached one
component at a time from the root and no symbolic link is followed below it, so no key leads out of a run.
The root itself may be a link, and is made by the first write.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from ckpt.errors import BadInputError
from ckpt.store import placing
from ckpt.store.base import Sink, Source, Store
from ckpt.store.keys import check_key, check_prefix, is_component
from ckpt.store.local_sink import LocalSink
from ckpt.store.local_source import DIRECT_NBYTES, OPEN_FLAGS, LocalSource, open_direct
from ckpt.store.oserrors import oversized, quantity, store_error

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NETWORK_LEFTOVER = ".nfs"  # a removed file that some client still holds open; its server removes it


class LocalStore(Store):
    """Keys are files under ``root``. Opened by ``open_store``; holds no descriptor between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self.url = self.root
        self._placing = placing.Placing()
        self._durable: set[tuple[str, ...]] = set()  # folders whose name was synced into the one above, by this store
        try:
            is_folder = stat.S_ISDIR(os.stat(self.root).st_mode)
        except NotADirectoryError:
            is_folder = False
        except OSError:  # absent: made by the first write; unreadable: each verb says so
            is_folder = True
        if not is_folder:
            raise BadInputError(f"{self.root}: is a file, or lies below one; expected a folder, or nothing yet")

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    # -- reading -----------------------------------------------------------------------------

    def get(self, key: str, *, limit_nbytes: int | None = None) -> bytes:
        """The whole file."""
        with self._errors(key, "read"), self._object(key) as (file, nbytes):
            if limit_nbytes is not None and nbytes > limit_nbytes:
                raise oversized(self._where(key), nbytes, limit_nbytes)
            data = bytearray(nbytes)
            found = _read_all(file, memoryview(data), 0)
            return bytes(data if found == nbytes else data[:found])

    def open_source(self, key: str, *, shared: bool = False) -> Source:
        """The open file; one that is ``shared`` is read through the page cache."""
        *components, name = check_key(key)
        with self._errors(key, "read"), self._folder(components) as folder:
            file = os.open(name, OPEN_FLAGS, dir_fd=folder)
            try:
                nbytes = _regular_nbytes(os.fstat(file))
                direct_file = None if shared or nbytes < DIRECT_NBYTES else open_direct(folder, name, file)
            except BaseException:
                os.close(file)
                raise
        return LocalSource(self._where(key), file, nbytes, direct_file=direct_file)

    def size(self, key: str) -> int:
        """The file's size, without opening it."""
        *components, name = check_key(key)
        with self._errors(key, "read"), self._folder(components) as folder:
            return _regular_nbytes(os.stat(name, dir_fd=folder, follow_symlinks=False))

    def list(self, prefix: str = "") -> builtins.list[str]:
        """Files and folders with names that a key may have; others are not ckpt's."""
        components = check_prefix(prefix)
        with self._errors(prefix, "list"):
            try:
                with self._folder(components) as folder:
                    return sorted(name for name in os.listdir(folder) if is_component(name))
            except FileNotFoundError:
                return []

    # -- writing -----------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> None:
        """Written and synced before it has its name; see ``ckpt.store.placing``."""
        *components, name = check_key(key)
        progress = f"in an object of {quantity(len(data))}"
        with self._errors(key, "write", progress), self._new_folder(components) as folder:
            self._placing.place(folder, name, data)

    def open_sink(self, key: str, nbytes: int | None = None) -> Sink:
        """A file under its final name; AlreadyExistsError comes here, at once."""
        *components, name = check_key(key)
        with self._errors(key, "write", "after 0 bytes"), self._new_folder(components) as folder:
            return LocalSink(self._where(key), folder, name, nbytes)

    def sync(self, key: str) -> None:
        """Sync the file and its folder."""
        *components, name = check_key(key)
        with self._errors(key, "sync"), self._folder(components) as folder:
            placing.sync_found(folder, name)

    def delete(self, key: str) -> None:
        """Unlink the file. One that is not there may have been unlinked just now, by a process that died of it."""
        *components, name = check_key(key)
        nothing = contextlib.suppress(FileNotFoundError)
        with self._errors(key, "delete"), nothing, self._folder(components) as folder:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder is no object
                os.unlink(name, dir_fd=folder)
            placing.sync_folder(folder)

    def delete_folder(self, prefix: str) -> None:
        """Remove the folder and all below it, also what is not ckpt's; links are removed, not followed."""
        *components, name = check_key(prefix)
        gone = (*components, name)
        self._durable -= {made for made in tuple(self._durable) if made[: len(gone)] == gone}
        nothing = contextlib.suppress(FileNotFoundError)
        with self._errors(prefix, "delete"), nothing, self._folder(components) as parent:
            with contextlib.suppress(FileNotFoundError):
                _remove_folder(parent, name)
            placing.sync_folder(parent)

    # -- folders and errors ------------------------------------------------------------------

    def _where(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    @contextlib.contextmanager
    def _errors(self, key: str, doing: str, progress: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise store_error(self._where(key), error, doing, progress) from error

    @contextlib.contextmanager
    def _object(self, key: str) -> Iterator[tuple[int, int]]:
        """Descriptor and size of a regular file; FileNotFoundError when absent or a folder."""
        *components, name = check_key(key)
        with self._folder(components) as folder:
            file = os.open(name, OPEN_FLAGS, dir_fd=folder)
        try:
            yield file, _regular_nbytes(os.fstat(file))
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _folder(self, components: Sequence[str]) -> Iterator[int]:
        """The descriptor of a folder that is there; FileNotFoundError when it is not."""
        folder = os.open(self.root, _FOLDER)
        try:
            for component in components:
                above, folder = folder, _find_folder(folder, component)
                os.close(above)
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _new_folder(self, components: Sequence[str]) -> Iterator[int]:
        """The same for writing: a folder that is absent is made, durably, and so is the root."""
        try:
            folder = os.open(self.root, _FOLDER)
        except FileNotFoundError:
            os.makedirs(self.root, exist_ok=True)
            self._durable.clear()
            folder = os.open(self.root, _FOLDER)
        try:
            if () not in self._durable:
                _sync_above(self.root)
                self._durable.add(())
            for depth, component in enumerate(components, 1):
                path = tuple(components[:depth])
                try:
                    below = _open_folder(folder, component)
                except FileNotFoundError:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(component, dir_fd=folder)
                    self._durable.discard(path)
                    below = _open_folder(folder, component)
                above, folder = folder, below
                try:
                    # Also for a folder that another process made: it may not have synced it yet.
                    if path not in self._durable:
                        placing.sync_folder(above)
                        self._durable.add(path)
                finally:
                    os.close(above)
            yield folder
        finally:
            os.close(folder)


def _regular_nbytes(found: os.stat_result) -> int:
    """A regular file's size; OSError for anything else."""
    if stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EBADFD, os.strerror(errno.EBADFD))
    return found.st_size


def _read_all(file: int, view: memoryview, offset: int) -> int:
    """Read until ``view`` is full or the file ends; how many bytes came."""
    done = 0
    while done < view.nbytes:
        found = os.preadv(file, [view[done:]], offset + done)
        if found == 0:
            break
        done += found
    return done


def _open_folder(above: int, name: str) -> int:
    """A folder by its name; OSError with ELOOP for a symbolic link, which the system calls no folder."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _find_folder(above: int, name: str) -> int:
    """The same for readers: below a file there is nothing, definitely, so FileNotFoundError."""
    try:
        return _open_folder(above, name)
    except NotADirectoryError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None


def _sync_above(root: str) -> None:
    """Make the root's own name durable, and those of the folders that it is in, up to where its file system begins.

    Whoever has made them, this process or one that died before it had synced them: what is written below is no
    safer than they are.
    """
    path = os.path.realpath(root)
    device, above = os.stat(path).st_dev, []
    while path != "/" and os.stat(path := os.path.dirname(path)).st_dev == device:
        above.append(path)
    for path in reversed(above):
        # A folder that may be entered but not read cannot be synced; its entries are its owner's care.
        with contextlib.suppress(PermissionError):
            folder = os.open(path, _FOLDER)
            try:
                placing.sync_folder(folder)
            finally:
                os.close(folder)


def _remove_folder(parent: int, name: str) -> None:
    """Remove a folder with all that is in it; links are removed, not followed. Others may do the same meanwhile."""
    folder = _find_folder(parent, name)
    try:
        for _ in range(3):  # again, when a writer adds names while they are removed
            for entry in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    try:
                        os.unlink(entry, dir_fd=folder)
                    except IsADirectoryError:
                        _remove_folder(folder, entry)
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
                left = os.listdir(folder)
                if left and all(entry.startswith(_NETWORK_LEFTOVER) for entry in left):
                    return
            else:
                return
        raise OSError(errno.ENOTEMPTY, "someone keeps writing into the folder")
    finally:
        os.close(folder)
