"""Create-only placement of a small file: whole and durable under its name, or not there.

Three ways, the best that the file system takes:

1. a file without a name (``O_TMPFILE``), written, synced, then linked to its name: a crash leaves nothing;
2. where there is no ``O_TMPFILE`` (NFS, Lustre), a file under a name of its own that begins with a dot, linked
   to its name and then unlinked: a crash may leave the dotted name, which no reader of the store sees;
3. where there are no hard links either (some FUSE and SMB mounts), ``O_EXCL`` under the name itself: the only
   way in which a crash can leave a torn object, or a reader catch it half-written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}
# ENOENT: no /proc. The same codes of a real fault come again, and are raised, from the next way.
_NO_LINK = {errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOENT, errno.EMLINK}
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Placing:
    """One store's way to place a file; remembers what its file system refused."""

    def __init__(self) -> None:
        self._ways = [_by_unnamed, _by_dotted, _by_name]

    def place(self, folder: int, name: str, data: bytes) -> None:
        """Put ``data`` under ``name`` in the folder of that descriptor.

        FileExistsError when the name is taken: what has it is synced by then.
        """
        try:
            self._place(folder, name, data)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # removed again meanwhile
                sync_found(folder, name)
            raise

    def _place(self, folder: int, name: str, data: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # cheaper than to write and sync first
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        for skipped, way in enumerate(ways := self._ways):
            try:
                way(folder, name, data)
            except _RefusedError:
                continue
            self._ways = ways[skipped:]  # what was refused once is not tried again
            try:
                sync_folder(folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                    sync_folder(folder)  # what else is in the folder may be removed next
                raise
            return


class _RefusedError(Exception):
    """This file system does not know the way; the next one is tried."""


def _by_unnamed(folder: int, name: str, data: bytes) -> None:
    try:
        file = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            raise _RefusedError from error
        raise
    try:
        _fill(file, data)
        try:
            # Without src_dir_fd, link() is called instead of linkat() and says EXDEV for a path in /proc.
            os.link(f"/proc/self/fd/{file}", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except OSError as error:
            if error.errno in _NO_LINK:
                raise _RefusedError from error
            raise
    finally:
        os.close(file)


def _by_dotted(folder: int, name: str, data: bytes) -> None:
    dotted = f".{secrets.token_hex(8)}.unfinished"
    file = os.open(dotted, _NEW, 0o666, dir_fd=folder)
    try:
        _fill(file, data)
        try:
            os.link(dotted, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            # An NFS request whose answer was lost is sent again and then meets its own link.
            if os.fstat(file).st_nlink != 2:
                raise
        except OSError as error:
            if error.errno in _NO_LINK:
                raise _RefusedError from error
            raise
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(dotted, dir_fd=folder)


def _by_name(folder: int, name: str, data: bytes) -> None:
    file = os.open(name, _NEW, 0o666, dir_fd=folder)
    try:
        try:
            _fill(file, data)
        finally:
            os.close(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


def _fill(file: int, data: bytes) -> None:
    rest, offset = memoryview(data), 0
    while rest:
        written = write_some(file, rest, offset)
        rest, offset = rest[written:], offset + written
    os.fsync(file)


def write_some(file: int, rest: memoryview, offset: int) -> int:
    """One ``pwrite``; how many bytes it took (the system may take fewer than given, but never none)."""
    written = os.pwrite(file, rest, offset)
    if written == 0:
        raise OSError(errno.EIO, "the device took no bytes")
    return written


def sync_found(folder: int, name: str) -> None:
    """Make a file durable that another process may have left without; FileNotFoundError when it is not there."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError:  # a link, or not ours to read: nothing that this store has made
        pass
    else:
        try:
            sync_folder(file)
        finally:
            os.close(file)
    sync_folder(folder)


def sync_folder(folder: int) -> None:
    """Make a folder's names durable; file systems that know no such thing (some FUSE and SMB mounts) are let be."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
