"""A run cut back to where a kill would have left it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cut_after(run: Path, step: int, to: Path) -> Path:
    """The run as it would be had its job been killed after committing ``step``."""
    shutil.copytree(run, to, copy_function=os.link)
    for folder in to.glob("step-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    return to
