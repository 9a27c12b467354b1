"""Real text that is on every machine: the source of Python's own standard library.

A token is a byte, so the vocabulary is the 256 values of a byte and there is no tokenizer to ship.
The files are laid end to end in the order of their names, each followed by a NUL, which Python source
cannot contain: the model sees where a file ends. A sample is a window of ``sequence + 1`` bytes: the
first ``sequence`` are read, the last ``sequence`` are what should have been predicted.

The order of the samples is not decided here. ``ckpt.ResumableLoader`` shuffles by seed and epoch and
hands out samples by their *global* position, whatever the number of ranks is.
"""

from __future__ import annotations

import os
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["END_OF_FILE", "Windows", "library_text"]

END_OF_FILE = b"\0"

# Tests are as large as the library itself and half of them is deliberately odd; site-packages differ
# from machine to machine.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


@lru_cache(maxsize=1)
def library_text(root: Path | None = None) -> bytes:
    """All ``.py`` files under ``root`` (default: the standard library), joined in the order of their names.

    The same interpreter gives the same bytes on every rank and after every restart. Files that cannot be
    read, and links (which lead out of the library on some systems), are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        files += [os.path.relpath(os.path.join(folder, name), root) for name in names if name.endswith(".py")]
    pieces: list[bytes] = []
    for name in sorted(files):  # by relative name: the order in which a disk lists files is not the same everywhere
        path = root / name
        if path.is_symlink():
            continue
        try:
            source = path.read_bytes()
        except OSError:
            continue
        if END_OF_FILE not in source:
            pieces += (source, END_OF_FILE)
    return b"".join(pieces)


class Windows(Dataset[Tensor]):
    """A map-style dataset of token windows: sample ``i`` is ``sequence + 1`` bytes from ``i * sequence`` on.

    Neighbours share one byte, the last target of one being the first input of the next, so every
    byte is predicted exactly once per epoch. A tail that is too short for a window is left out.
    """

    def __init__(self, text: bytes, sequence: int) -> None:
        if len(text) <= sequence:
            raise ValueError(f"a text of {len(text)} bytes has no window of {sequence} + 1 bytes")
        self.sequence = sequence
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes,)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, index: int) -> Tensor:
        """Sample ``index`` as token ids: int64 (T + 1,)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.sequence
        return self.tokens[start : start + self.sequence + 1].long()
