"""A file system of fsspec that behaves as object storage does, kept in a folder so that every process sees it.

``object:///folder/run``. A file holds its bytes until it is closed and has no descriptor; an object appears whole or
not at all; there are no folders, only names with slashes. ``listed`` is cached as fsspec's own file systems do it.
The variable ``OBJECT_FAULTS`` (JSON) makes it misbehave, in the keeper too; ``reach_keepers`` brings it there.
"""

from __future__ import annotations

import fnmatch
import io
import json
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

FAULTS_ENV = "OBJECT_FAULTS"
_GONE = ".gone-"  # an object that was deleted; a listing may show it for a while


def faults() -> dict[str, Any]:
    """``lag_s``: listings show new objects so much later, and deleted ones for so long (or ``gone_s``).

    ``conditional``: False, nothing is created only if absent.
    ``fail``: pairs of a pattern of paths, and when their file fails: ``write``, ``close``, or ``late``, a close that
    has stored the object all the same.
    """
    found: dict[str, Any] = json.loads(os.environ.get(FAULTS_ENV, "{}"))
    return found


class ObjectFileSystem(AbstractFileSystem):
    """See the module."""

    protocol = "object"
    root_marker = "/"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Asked of the key itself."""
        path = self._strip_protocol(path)
        if os.path.isfile(path):
            return {"name": path, "size": os.path.getsize(path), "type": "file"}
        if os.path.isdir(path) and any(files for _, _, files in os.walk(path)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """From the cache if it has the path, and behind by ``lag_s``."""
        path = self._strip_protocol(path)
        entries = self._ls_from_cache(path)
        if entries is None:
            entries = [{"name": path, "type": "file", "size": 0}] if os.path.isfile(path) else self._listed(path)
            if not entries:
                raise FileNotFoundError(path)
            self.dircache[path] = entries
        return entries if detail else [entry["name"] for entry in entries]

    def _listed(self, path: str) -> list[dict[str, Any]]:
        lag_s = faults().get("lag_s", 0)
        gone_s = faults().get("gone_s", lag_s)
        found = []
        for name in os.listdir(path) if os.path.isdir(path) else []:
            full = os.path.join(path, name)
            try:
                age_s = time.time() - os.stat(full).st_mtime
            except FileNotFoundError:
                continue
            if os.path.isdir(full):
                if self._listed(full):
                    found.append({"name": full, "type": "directory", "size": 0})
            elif name.startswith(_GONE):
                if age_s < gone_s:
                    found.append({"name": os.path.join(path, name.removeprefix(_GONE)), "type": "file", "size": 1})
            elif age_s >= lag_s:
                found.append({"name": full, "type": "file", "size": os.path.getsize(full)})
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """A range."""
        with open(self._strip_protocol(path), "rb") as file:
            return file.read()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Whole, or not at all."""
        check(path, "write")
        check(path, "close")
        self.place(self._strip_protocol(path), value, mode == "create")
        check(path, "late")

    def rm_file(self, path: str) -> None:
        """The object goes at once, its name from listings later."""
        path = self._strip_protocol(path)
        os.remove(path)
        if {"lag_s", "gone_s"} & set(faults()):
            Path(os.path.dirname(path), _GONE + os.path.basename(path)).touch()

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        if mode not in {"wb", "xb"}:
            raise NotImplementedError(mode)
        return ObjectFile(self, path, mode == "xb")

    def place(self, path: str, value: bytes, only_new: bool) -> None:
        """Put an object under its name."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        beside = os.path.join(os.path.dirname(path), f"{_GONE}{secrets.token_hex(8)}")
        with open(beside, "wb") as file:
            file.write(value)
        if only_new and faults().get("conditional", True):
            try:
                os.link(beside, path)
            finally:
                os.remove(beside)
        else:
            os.replace(beside, path)


class ObjectFile(io.RawIOBase):
    """A new object; like fsspec's own files it stores what it has when it is closed, by whomever."""

    def __init__(self, filesystem: ObjectFileSystem, path: str, only_new: bool) -> None:
        self.filesystem, self.path, self.only_new = filesystem, path, only_new
        self.held = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        check(self.path, "write")
        self.held += data
        return len(data)

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")

    def discard(self) -> None:
        """As fsspec's: says nothing of closing."""

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        check(self.path, "close")
        self.filesystem.place(self.path, bytes(self.held), self.only_new)
        check(self.path, "late")


class BufferedFileSystem(ObjectFileSystem):
    """The same with the files that fsspec's own remote file systems have, which send what they hold block by block."""

    protocol = "buffered"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode)
        return BufferedFile(self, self._strip_protocol(path), mode, block_size=block_size or 5 << 20)


class BufferedFile(AbstractBufferedFile):
    """Blocks become an object when the last one was sent."""

    def _initiate_upload(self) -> None:
        self.sent: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        check(self.path, "write")
        self.sent.append(self.buffer.getvalue())
        if final:
            check(self.path, "close")
            self.fs.place(self.path, b"".join(self.sent), self.mode == "xb")
            check(self.path, "late")
        return True


class GrowingFileSystem(AbstractFileSystem):
    """Files on a server, as over SFTP: folders are made first, and a file is seen while it grows."""

    protocol = "growing"
    root_marker = "/"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found = os.stat(path)
        return {"name": path, "size": found.st_size, "type": "directory" if stat.S_ISDIR(found.st_mode) else "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        names = [path] if os.path.isfile(path) else [os.path.join(path, name) for name in os.listdir(path)]
        return [self.info(name) for name in names if os.path.exists(name)] if detail else names

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rm_file(self, path: str) -> None:
        os.remove(self._strip_protocol(path))

    def rmdir(self, path: str) -> None:
        os.rmdir(self._strip_protocol(path))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return GrowingFile(self._strip_protocol(path), mode)


class GrowingFile(io.RawIOBase):
    """A file on a server; what is written is there at once."""

    def __init__(self, path: str, mode: str) -> None:
        self.path, self.file = path, open(path, mode, buffering=0)  # noqa: SIM115 - closed by close

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, *where: int) -> int:
        return self.file.seek(*where)

    def readinto(self, into: Any) -> int | None:
        return self.file.readinto(into)

    def write(self, data: Any) -> int | None:
        check(self.path, "write")
        return self.file.write(data[: 1 << 20])

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")

    def close(self) -> None:
        if not self.closed:
            self.file.close()
            super().close()
            if not self.file.mode.startswith("r"):
                check(self.path, "close")


def check(path: str, when: str) -> None:
    """Raise the error that the test asked for."""
    if any(when == asked and fnmatch.fnmatch(path, pattern) for pattern, asked in faults().get("fail", [])):
        raise OSError(5, "boom")


def register() -> None:
    """Have fsspec know them, in this process."""
    for cls in (ObjectFileSystem, BufferedFileSystem, GrowingFileSystem):
        fsspec.register_implementation(cls.protocol, cls, clobber=True)


def misbehave(monkeypatch: Any, **asked: Any) -> None:
    """Have it do so, here and in processes started from now on; without arguments no longer."""
    monkeypatch.setenv(FAULTS_ENV, json.dumps(asked))


def reach_keepers(monkeypatch: Any, folder: Path) -> None:
    """Have processes that are started from now on know it too, and this one."""
    register()
    (folder / "objects_stub.py").write_text(Path(__file__).read_text())
    (folder / "sitecustomize.py").write_text("import objects_stub\n\nobjects_stub.register()\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
