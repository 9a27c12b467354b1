"""ckpt: sharded, asynchronous checkpoints and fast restart for PyTorch training.

Importing it does not import torch: each public name is fetched from its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.engine.checkpointer import Checkpointer, best, every, keep
    from ckpt.engine.load import LoadReport, latest, load, read, steps
    from ckpt.engine.pending import PendingSave, SaveReport
    from ckpt.engine.save import save
    from ckpt.errors import (
        AlreadyExistsError,
        BadInputError,
        CkptError,
        DamagedError,
        FencedError,
        KeeperError,
        MismatchError,
        NotFoundError,
        Preempted,
        RankError,
        SaveFailedError,
        StoreError,
        UnsupportedFormatError,
        UnsupportedValueError,
    )
    from ckpt.reading.verify import VerifyReport, verify
    from ckpt.state import RNG, PerRank, ResumableLoader, per_rank

__version__ = "0.1.0"

__all__ = [
    "RNG",
    "AlreadyExistsError",
    "BadInputError",
    "Checkpointer",
    "CkptError",
    "DamagedError",
    "FailedSave",
    "FencedError",
    "KeeperError",
    "LoadReport",
    "MismatchError",
    "NotFoundError",
    "PendingSave",
    "PerRank",
    "Preempted",
    "RankError",
    "ResumableLoader",
    "SaveFailedError",
    "SaveReport",
    "StoreError",
    "UnsupportedFormatError",
    "UnsupportedValueError",
    "VerifyReport",
    "best",
    "every",
    "keep",
    "latest",
    "load",
    "per_rank",
    "read",
    "save",
    "steps",
    "verify",
]

_HOMES = {
    "Checkpointer": "ckpt.engine.checkpointer",
    "FailedSave": "ckpt.engine.failures",
    "LoadReport": "ckpt.engine.load",
    "PendingSave": "ckpt.engine.pending",
    "PerRank": "ckpt.state",
    "RNG": "ckpt.state",
    "ResumableLoader": "ckpt.state",
    "SaveReport": "ckpt.engine.pending",
    "VerifyReport": "ckpt.reading.verify",
    "best": "ckpt.engine.checkpointer",
    "every": "ckpt.engine.checkpointer",
    "keep": "ckpt.engine.checkpointer",
    "latest": "ckpt.engine.load",
    "load": "ckpt.engine.load",
    "per_rank": "ckpt.state",
    "read": "ckpt.engine.load",
    "save": "ckpt.engine.save",
    "steps": "ckpt.engine.load",
    "verify": "ckpt.reading.verify",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "ckpt.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
