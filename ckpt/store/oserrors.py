"""The sentence for each way in which an operating system refuses: what was found, where, and what to do."""

from __future__ import annotations

import errno
import os

from ckpt.errors import AlreadyExistsError, CkptError, NotFoundError, StoreError

_UNTOUCHED = "earlier steps are untouched"
_SENTENCES: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("no space left on the device", "free space or choose another place for the run"),
    errno.EDQUOT: ("the disk quota is used up", "free space, or have the quota raised"),
    errno.EFBIG: ("the file may not grow further", "raise `ulimit -f`, or use a file system that takes larger files"),
    errno.EACCES: ("permission denied", "check owner and mode of the folder and of those above it"),
    errno.EPERM: ("operation not permitted", "check owner, mode and attributes (lsattr) of the folder"),
    errno.EROFS: ("the file system is read-only", "remount it for writing, or choose another place for the run"),
    errno.EIO: ("the device reports an I/O error", "check the disk or the network mount (dmesg)"),
    errno.ENOTDIR: ("a file stands where a folder is expected", "move the file away, or correct the path"),
    errno.EISDIR: ("a folder stands where a file is expected", "move the folder away, or correct the path"),
    errno.ELOOP: (
        "a symbolic link, and none is followed below the root of a run",
        "put the real file or folder there, or open the run at its real path",
    ),
    # Opening a socket says ENXIO; a FIFO or a device is opened, without waiting, and then found to be what it is.
    errno.EBADFD: ("neither file nor folder", "remove it"),
    errno.ENXIO: ("neither file nor folder", "remove it"),
    errno.ENOENT: ("the folder vanished meanwhile", "check who removes files of this run"),
    errno.ENAMETOOLONG: ("the path is too long for the file system", "choose a shorter path for the run"),
    errno.EMFILE: ("too many open files in this process", "raise `ulimit -n`"),
    errno.ENFILE: ("too many open files on this machine", "raise fs.file-max"),
    errno.ESTALE: ("the network mount went stale", "mount it again"),
    errno.EINVAL: ("the file system refuses the operation", "choose another file system for the run"),
}
_BY_BYTES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # where it matters how far the writing came

# What reading says of one object alone: a bad sector, a link or a FIFO where a file was, a file system's own checksum.
_OF_THE_OBJECT = {
    errno.EIO,
    errno.ELOOP,
    errno.EUCLEAN,
    errno.EBADMSG,
    errno.ENODATA,
    errno.EBADFD,
    errno.ENXIO,
    errno.EFBIG,
}


def is_unreadable(error: BaseException) -> bool:
    """Whether a StoreError says that this one object cannot be read: damage, not a store that fails as a whole."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _OF_THE_OBJECT


def oversized(where: str, nbytes: int, limit_nbytes: int) -> StoreError:
    """The error to raise for an object that is larger than its reader allows: that object's fault, not the store's."""
    error = StoreError(f"{where}: {quantity(nbytes)}, at most {quantity(limit_nbytes)} expected")
    error.__cause__ = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return error


def quantity(nbytes: int) -> str:
    """``999 bytes``, or ``3,145,728 bytes (3.1 MB)``."""
    exact = f"{nbytes:,} byte{'' if nbytes == 1 else 's'}"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{exact} ({nbytes / size:.1f} {unit})"
    return exact


def store_error(where: str, error: OSError, doing: str, progress: str = "") -> CkptError:
    """The error to raise ``from error``.

    ``where`` is root and key, ``doing`` is ``read``, ``list``, ``write`` or ``delete``, ``progress`` such as
    ``after 3 bytes``. NotFoundError for an absent object (not while writing), AlreadyExistsError for one that stands
    there, else StoreError.
    """
    if isinstance(error, FileNotFoundError) and doing != "write":
        return NotFoundError(f"{where}: not there")
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(f"{where}: exists already, and objects are never replaced")
    code = error.errno or 0
    said = error.strerror or str(error)
    known = _SENTENCES.get(code)
    what, advice = known or (f"{said} ({errno.errorcode.get(code, 'no errno')})", "see the cause")
    if known and said != os.strerror(code):
        what = f"{what} ({said})"
    progress = f" {progress}" if progress and (code in _BY_BYTES or not known) else ""
    tail = f"; {_UNTOUCHED}" if doing == "write" else ""
    return StoreError(f"{where}: cannot {doing}: {what}{progress}; {advice}{tail}")
