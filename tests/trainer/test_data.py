"""The text and the windows over it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainer.data import END_OF_FILE, Windows, library_text


def test_the_text_is_the_standard_library() -> None:
    """Megabytes of source, files ended by NUL, the same bytes at each reading."""
    text = library_text()
    assert len(text) > 5_000_000
    assert text.count(END_OF_FILE) > 300
    assert text.endswith(END_OF_FILE)
    assert b"class OrderedDict(dict):" in text
    library_text.cache_clear()
    assert library_text() == text


def test_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Whatever order the disk lists them in; tests, links, other files and files with a NUL stay out."""
    for name in ("b.py", "a/z.py", "a.py", "c.txt", "test/t.py", "site-packages/s.py", "nul.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\0" if name == "nul.py" else name)
    os.symlink(tmp_path / "c.txt", tmp_path / "link.py")
    os.symlink(tmp_path / "gone", tmp_path / "broken.py")
    assert library_text(tmp_path) == b"a.py\0a/z.py\0b.py\0"


def test_every_byte_is_a_target_once() -> None:
    """Windows meet in one byte: the targets of all of them are the text without its first byte and its tail."""
    text = bytes(range(100))
    windows = Windows(text, sequence=7)
    targets = torch.cat([windows[i][1:] for i in range(len(windows))])
    assert len(windows) == 14
    assert windows[3].dtype == torch.int64
    assert windows[3].tolist() == list(range(21, 29))
    assert targets.tolist() == list(range(1, 99))


def test_bad_windows_are_refused() -> None:
    """A text that is too short, and a sample that does not exist."""
    with pytest.raises(ValueError, match="no window of 7"):
        Windows(b"1234567", sequence=7)
    with pytest.raises(IndexError, match="sample 1 of 1"):
        Windows(b"12345678", sequence=7)[1]
