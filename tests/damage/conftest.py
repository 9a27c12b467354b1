"""Many damages in little time: no keeper is asked, and nothing waits for a disk."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def quick(tmp_path_factory, monkeypatch):
    """What is tested is what bytes come out; that they are durable is the stores' own test.

    Loads look for keepers of this user, and find the folder of another one.
    """
    folder = tmp_path_factory.mktemp("no-keepers")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(os, "fsync", lambda _file: None)
