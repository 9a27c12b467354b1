"""Every system call by which Python code changes what lies on storage, seen before and after it is made.

The functions of ``os`` are replaced, and with them ``open`` for writing, so that no line of the code under test has to
know of it and none can be forgotten: an audit hook raises for what changes a watched folder past these functions.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import importlib
import io
import mmap
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

UNNAMED = "(unnamed)"  # what a file of O_TMPFILE is called, under its folder
_DELETED = re.compile(r"#\d+ \(deleted\)$")
_CREATES = os.O_CREAT | os.O_TRUNC
# What no part of ckpt does to its files, and an error in a watched folder: whoever begins to must add it here.
_UNKNOWN = (
    "copy_file_range", "ftruncate", "mkfifo", "mknod", "posix_fallocate", "rename", "replace", "sendfile", "splice",
    "symlink", "truncate",
)  # fmt: skip


@dataclass
class StorageCall:
    """One call: ``open`` (of a new file), ``write``, ``fsync``, ``link``, ``unlink``, ``mkdir``, ``rmdir``."""

    name: str
    path: str  # absolute
    inode: int = 0  # of what it is about; of a new file or folder once it is there
    is_folder: bool = False
    offset: int = 0
    payload: bytes = b""  # what a write writes


Proceed = Callable[[], Any]
Half = Callable[[], Any] | None  # does half of a write of 2 bytes or more, in place of all of it
Around = Callable[[StorageCall, Proceed, Half], Any]
Watched = Callable[[str], bool]

_PYTHONS_OPEN: Callable[..., Any] = importlib.import_module("_pyio").open  # typeshed does not know the module
_inside = threading.local()


@contextlib.contextmanager
def interposed(around: Around, watched: Watched) -> Iterator[None]:
    """``around(call, proceed, half)`` is called in place of each changing call on a path that is ``watched``.

    It has to return what ``proceed()`` returns. For this process, all of its threads; undone at the end.
    """
    undo = interpose(around, watched)
    try:
        yield
    finally:
        undo()


def interpose(around: Around, watched: Watched) -> Callable[[], None]:
    """The same without an end; what is returned ends it."""
    seen = _Seen(around, watched)
    replaced: list[tuple[Any, str, Any]] = []
    for name in (*_UNKNOWN, "open", "write", "writev", "pwrite", "pwritev", "fsync", "fdatasync", "link", "unlink",
                 "remove", "rmdir", "mkdir"):  # fmt: skip
        original = getattr(os, name)
        make = getattr(seen, f"{name}_", None)
        replaced.append((os, name, original))
        setattr(os, name, make(original) if make is not None else seen.unknown(name, original))
    for owner in (builtins, io):
        replaced.append((owner, "open", owner.open))
        owner.open = seen.file_open(owner.open)  # type: ignore[attr-defined]
    _hooks.append(seen)
    if len(_hooks) == 1:
        sys.addaudithook(_audit)

    def undo() -> None:
        seen.ended = True
        for owner, name, original in replaced:
            setattr(owner, name, original)

    return undo


class _Seen:
    """Makes the functions that stand in for those of ``os``."""

    def __init__(self, around: Around, watched: Watched) -> None:
        self._around, self._watched = around, watched
        self.ended = False

    def call(self, call: StorageCall, proceed: Proceed, half: Half = None) -> Any:
        """One call within ``around``."""

        def within() -> Any:
            _inside.depth = getattr(_inside, "depth", 0) + 1
            try:
                return proceed()
            finally:
                _inside.depth -= 1

        return self._around(call, within, half)

    # -- names -----------------------------------------------------------------------------

    def open_(self, original: Callable[..., int]) -> Callable[..., int]:
        def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            def proceed() -> int:
                file = original(path, flags, mode, dir_fd=dir_fd)
                found = os.fstat(file)
                call.inode, call.is_folder = found.st_ino, stat.S_ISDIR(found.st_mode)
                return file

            is_unnamed = flags & os.O_TMPFILE == os.O_TMPFILE
            if not (is_unnamed or flags & _CREATES):
                return original(path, flags, mode, dir_fd=dir_fd)
            where = resolve(path, dir_fd)
            if not self._watched(where):
                return original(path, flags, mode, dir_fd=dir_fd)
            call = StorageCall("open", f"{where}/{UNNAMED}" if is_unnamed else where)
            if not is_unnamed and os.path.lexists(where):
                if flags & os.O_EXCL or not flags & os.O_TRUNC:
                    return original(path, flags, mode, dir_fd=dir_fd)  # makes nothing
                call.name = "truncate"
            opened: int = self.call(call, proceed)
            return opened

        return opening

    def link_(self, original: Callable[..., None]) -> Callable[..., None]:
        def linking(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None,
            follow_symlinks: bool = True,
        ) -> None:  # fmt: skip
            def proceed() -> None:
                original(
                    src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks
                )  # fmt: skip

            where = resolve(dst, dst_dir_fd)
            if not self._watched(where):
                return proceed()
            inode = os.stat(src, dir_fd=src_dir_fd, follow_symlinks=follow_symlinks).st_ino
            self.call(StorageCall("link", where, inode), proceed)
            return None

        return linking

    def unlink_(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._named("unlink", original)

    remove_ = unlink_

    def rmdir_(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._named("rmdir", original)

    def mkdir_(self, original: Callable[..., None]) -> Callable[..., None]:
        def making(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            def proceed() -> None:
                original(path, mode, dir_fd=dir_fd)
                call.inode = os.stat(path, dir_fd=dir_fd).st_ino

            where = resolve(path, dir_fd)
            if not self._watched(where):
                return original(path, mode, dir_fd=dir_fd)
            call = StorageCall("mkdir", where, is_folder=True)
            self.call(call, proceed)
            return None

        return making

    def _named(self, name: str, original: Callable[..., None]) -> Callable[..., None]:
        def removing(path: Any, *, dir_fd: int | None = None) -> None:
            where = resolve(path, dir_fd)
            if not self._watched(where):
                return original(path, dir_fd=dir_fd)
            self.call(StorageCall(name, where), lambda: original(path, dir_fd=dir_fd))
            return None

        return removing

    # -- contents ----------------------------------------------------------------------------

    def fsync_(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def syncing(file: Any) -> None:
            file = file if isinstance(file, int) else file.fileno()
            where = path_of(file)
            if not self._watched(where):
                return original(file)
            found = os.fstat(file)
            call = StorageCall("fsync", where, found.st_ino, stat.S_ISDIR(found.st_mode))
            self.call(call, lambda: original(file))
            return None

        return syncing

    fdatasync_ = fsync_

    def write_(self, original: Callable[..., int]) -> Callable[..., int]:
        def writing(file: int, content: Any) -> int:
            if not self._watched(path_of(file)):
                return original(file, content)
            end = os.SEEK_END if _flags(file) & os.O_APPEND else os.SEEK_CUR
            return self._write(file, [content], os.lseek(file, 0, end), lambda view: original(file, view))

        return writing

    def writev_(self, original: Callable[..., int]) -> Callable[..., int]:
        def writing(file: int, contents: Sequence[Any]) -> int:
            if not self._watched(path_of(file)):
                return original(file, contents)
            offset = os.lseek(file, 0, os.SEEK_CUR)
            return self._write(file, contents, offset, lambda view: original(file, [view]))

        return writing

    def pwrite_(self, original: Callable[..., int]) -> Callable[..., int]:
        def writing(file: int, content: Any, offset: int) -> int:
            if not self._watched(path_of(file)):
                return original(file, content, offset)
            return self._write(file, [content], offset, lambda view: original(file, view, offset))

        return writing

    def pwritev_(self, original: Callable[..., int]) -> Callable[..., int]:
        def writing(file: int, contents: Sequence[Any], offset: int, flags: int = 0) -> int:
            if not self._watched(path_of(file)):
                return original(file, contents, offset, flags)
            return self._write(file, contents, offset, lambda view: original(file, [view], offset, flags))

        return writing

    def _write(self, file: int, contents: Sequence[Any], offset: int, write: Callable[[Any], int]) -> int:
        whole = memoryview(contents[0]).cast("B") if len(contents) == 1 else memoryview(b"".join(contents))
        call = StorageCall("write", path_of(file), os.fstat(file).st_ino, offset=offset, payload=bytes(whole))

        def proceed() -> int:
            written = write(whole)
            call.payload = call.payload[:written]
            return written

        half = whole.nbytes // 2
        # Half of a page-aligned write may be none: O_DIRECT takes whole pages only.
        half -= half % 4096 if half >= 4096 else 0
        taken: int = self.call(call, proceed, (lambda: write(whole[:half])) if half else None)
        return taken

    # -- the rest ----------------------------------------------------------------------------

    def file_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``open``; for writing Python's own implementation of it, which goes through ``os``."""

        def opening(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if not set(mode) & set("wax+"):
                return original(file, mode, *arguments, **keywords)
            where = path_of(file) if isinstance(file, int) else resolve(file, None)
            implementation = _PYTHONS_OPEN if self._watched(where) else original
            return implementation(file, mode, *arguments, **keywords)

        return opening

    def unknown(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that must not be used on what is watched."""

        def refusing(*arguments: Any, **keywords: Any) -> Any:
            for argument in arguments[:2]:
                where = path_of(argument) if isinstance(argument, int) else resolve(argument, None)
                if self._watched(where):
                    raise RuntimeError(f"os.{name} on {where}: {__name__} does not know this call; add it there")
            return original(*arguments, **keywords)

        return refusing

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise for a change to what is watched that came past the functions above."""
        if self.ended or getattr(_inside, "depth", 0) > 0:
            return
        where = None
        if event == "mmap.__new__":
            where = path_of(arguments[0]) if arguments[0] >= 0 and arguments[2] != mmap.ACCESS_READ else None
        elif event == "open":
            flags = arguments[2]
            is_path = isinstance(arguments[0], str | bytes | os.PathLike)
            where = resolve(arguments[0], None) if is_path and flags & (os.O_WRONLY | os.O_RDWR) else None
        elif event in {"os.link", "os.rename", "os.symlink"}:
            where = resolve(arguments[1], None)
        elif event in {"os.remove", "os.mkdir", "os.rmdir", "os.truncate"}:
            where = resolve(arguments[0], None)
        if where is not None and self._watched(where) and not (event == "open" and os.path.lexists(where)):
            raise RuntimeError(f"{event} {where}: past the functions of os, where {__name__} cannot see it")


_hooks: list[_Seen] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Python keeps audit hooks for ever: one for all, which looks whether anyone is watching."""
    if event.startswith(("os.", "open", "mmap.")):
        for seen in _hooks:
            seen.audit(event, arguments)


def resolve(path: Any, dir_fd: int | None) -> str:
    """The absolute path that a call means: links in the folders above are followed, the last component is not."""
    if isinstance(path, int):
        return path_of(path)
    text = os.fsdecode(path)
    if dir_fd is not None and dir_fd >= 0 and not text.startswith("/"):
        text = os.path.join(path_of(dir_fd), text)
    above, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(above), name)


def path_of(file: int) -> str:
    """The path of an open file or folder; for one of O_TMPFILE its folder and ``(unnamed)``, also once it is linked."""
    try:
        return _DELETED.sub(UNNAMED, os.readlink(f"/proc/self/fd/{file}"))
    except OSError:
        return ""


def _flags(file: int) -> int:
    return fcntl.fcntl(file, fcntl.F_GETFL)
