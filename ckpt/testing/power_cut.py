"""Power cuts: what a crash of the machine could leave on the disk, told from a record of storage calls.

A process that is killed loses nothing that it has written; a machine loses whatever was not synced, in any
combination. ``Disk`` follows the calls (``ckpt.testing.kill_points`` or ``system_calls`` record them) and knows what
is surely there: the bytes of a file as of its last fsync, the names in a folder as of the folder's. Everything since is
in doubt, each name and each file for itself, whatever the order in which it was done: POSIX promises no more.
"""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from ckpt.testing.system_calls import UNNAMED, StorageCall

EXHAUSTIVE = 64  # up to so many combinations all are made, else the extreme ones and random ones
RANDOM = 24

Tree: TypeAlias = Mapping[str, bytes | None]  # path below the disk's root -> content; None: a folder


@dataclass(eq=False)
class _File:
    synced: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def content(self, choice: str) -> bytes:
        """What is found: nothing "lost" of what is pending, "kept", as "zeros" of the right size, or "half" of it."""
        found = bytearray(self.synced)
        for offset, payload in self.pending:
            if choice == "lost":
                continue
            written = payload[: len(payload) // 2] if choice == "half" else payload
            written = bytes(len(written)) if choice == "zeros" else written
            found.extend(bytes(max(0, offset - len(found))))
            found[offset : offset + len(written)] = written
        return bytes(found)


@dataclass(eq=False)
class _Folder:
    now: dict[str, _Node] = field(default_factory=dict)  # as processes see it
    synced: dict[str, _Node] = field(default_factory=dict)
    pending: dict[str, list[_Node | None]] = field(default_factory=dict)  # what each name has become since

    def set(self, name: str, node: _Node | None) -> None:
        """A name is made, or (None) removed."""
        if node is None:
            self.now.pop(name, None)
        else:
            self.now[name] = node
        self.pending.setdefault(name, []).append(node)

    def options(self, name: str) -> list[_Node | None]:
        """All that a pending name may be after a crash, first what is synced, last what it is now."""
        return [self.synced.get(name), *self.pending[name]]


_Node: TypeAlias = _File | _Folder
_NodeType = TypeVar("_NodeType", _File, _Folder)
_CONTENTS = ("lost", "kept", "zeros", "half")


class Disk:
    """What lies under ``root``, a folder as it is now and as sure as can be, and then after each ``apply``."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self._nodes: dict[int, _Node] = {}
        self._top = self._scan(self.root)

    def apply(self, call: StorageCall) -> None:
        """A call was made, under this root."""
        if call.name == "fsync":
            node = self._nodes[call.inode]
            if isinstance(node, _File):
                node.synced, node.pending = node.content("kept"), []
            else:
                node.synced, node.pending = dict(node.now), {}
            return
        if call.name == "write":
            file = self._nodes[call.inode]
            assert isinstance(file, _File)
            file.pending.append((call.offset, call.payload))
            return
        above, name = os.path.split(call.path)
        folder = self._find(above)
        if call.name in {"open", "mkdir"}:  # a number that was used before now names this one
            self._nodes[call.inode] = _Folder() if call.name == "mkdir" else _File()
        if call.name in {"open", "mkdir", "link"} and name != UNNAMED:
            folder.set(name, self._nodes[call.inode])
        elif call.name in {"unlink", "rmdir"}:
            folder.set(name, None)
        elif name != UNNAMED:
            raise ValueError(f"no model of {call.name} {call.path}: add it to {__name__}")

    def now(self) -> Tree:
        """What processes see."""
        return dict(self._walk(self._top, "", lambda folder, name: folder.now.get(name), lambda _: "kept"))

    def images(self, seed: int = 0) -> Iterator[tuple[str, Tree]]:
        """(how it came, what the disk holds) for crashes at this moment: every combination, or the extremes and some.

        The same tree may come more than once.
        """
        names = [(folder, name) for folder in self._all(_Folder) for name in folder.pending]
        files = [file for file in self._all(_File) if file.pending]
        ranges = [range(len(folder.options(name))) for folder, name in names] + [range(len(_CONTENTS))] * len(files)
        number = 1
        for options in ranges:
            number *= len(options)
        if number <= EXHAUSTIVE:
            for choices in itertools.product(*ranges):
                yield f"combination {choices}", self._image(names, files, choices)
            return
        for kept in ("lost", "kept", "made", "removed"):
            chosen = [_extreme(folder, name, kept) for folder, name in names]
            for content in range(len(_CONTENTS)):
                what = f"names {kept}, contents {_CONTENTS[content]}"
                yield what, self._image(names, files, [*chosen, *[content] * len(files)])
        generator = random.Random(seed)
        for _ in range(RANDOM):
            choices = tuple(generator.randrange(len(options)) for options in ranges)
            yield f"random {choices}", self._image(names, files, choices)

    def _image(self, names: Sequence[tuple[_Folder, str]], files: Sequence[_File], choices: Sequence[int]) -> Tree:
        entries = {
            (id(folder), name): folder.options(name)[c] for (folder, name), c in zip(names, choices, strict=False)
        }
        contents = {id(file): _CONTENTS[c] for file, c in zip(files, choices[len(names) :], strict=True)}

        def entry(folder: _Folder, name: str) -> _Node | None:
            return entries[id(folder), name] if name in folder.pending else folder.synced.get(name)

        return dict(self._walk(self._top, "", entry, lambda file: contents.get(id(file), "kept")))

    def _walk(
        self, folder: _Folder, above: str, entry: Callable[[_Folder, str], _Node | None],
        content: Callable[[_File], str],
    ) -> Iterator[tuple[str, bytes | None]]:  # fmt: skip
        for name in sorted({*folder.synced, *folder.pending, *folder.now}):
            node = entry(folder, name)
            if isinstance(node, _File):
                yield f"{above}{name}", node.content(content(node))
            elif node is not None:
                yield f"{above}{name}", None
                yield from self._walk(node, f"{above}{name}/", entry, content)

    def _all(self, kind: type[_NodeType]) -> list[_NodeType]:
        """All nodes that a crash can bring back, in a fixed order."""
        found: dict[int, _Node] = {}

        def visit(node: _Node) -> None:
            if id(node) in found:
                return
            found[id(node)] = node
            if isinstance(node, _Folder):
                for name in sorted({*node.synced, *node.pending}):
                    for option in node.options(name) if name in node.pending else [node.synced[name]]:
                        if option is not None:
                            visit(option)

        visit(self._top)
        return [node for node in found.values() if isinstance(node, kind)]

    def _find(self, path: str) -> _Folder:
        node: _Node = self._top
        inside = os.path.relpath(path, self.root)
        for component in [] if inside == "." else inside.split("/"):
            assert isinstance(node, _Folder)
            node = node.now[component]
        assert isinstance(node, _Folder)
        return node

    def _scan(self, path: str) -> _Folder:
        folder = _Folder()
        self._nodes[os.lstat(path).st_ino] = folder
        for name in os.listdir(path):
            below = os.path.join(path, name)
            found = os.lstat(below)
            node: _Node = self._scan(below) if stat.S_ISDIR(found.st_mode) else _File(Path(below).read_bytes())
            folder.now[name] = folder.synced[name] = node
            self._nodes[found.st_ino] = node
        return folder


def _extreme(folder: _Folder, name: str, kept: str) -> int:
    """Which of a name's options: what is synced, what is now, or what is now if it was made (or removed)."""
    last = len(folder.options(name)) - 1
    is_removed = folder.options(name)[last] is None
    return last if kept in {"kept", "removed" if is_removed else "made"} else 0


def write_tree(tree: Tree, folder: str | os.PathLike[str]) -> None:
    """Make a folder of what a disk holds."""
    Path(folder).mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            Path(folder, path).mkdir()
        else:
            Path(folder, path).write_bytes(content)
