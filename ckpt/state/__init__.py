"""An application's state to named shards and typed values, and back in place.

The only room that knows torch's wrappers. ``flatten`` is the first half of a save, ``wanted`` and
``LoadTarget.apply`` are the two ends of a load, ``read_tree`` is a load without a template.
"""

from __future__ import annotations

from ckpt.state.data import ResumableLoader
from ckpt.state.flatten import flatten
from ckpt.state.load import wanted
from ckpt.state.optimizer import moments_nbytes
from ckpt.state.read import read_tree
from ckpt.state.records import FlatState, Mismatch, PerRank, Read, StoredState, StoredTensor, TensorLeaf, per_rank
from ckpt.state.rng import RNG
from ckpt.state.target import LoadTarget
from ckpt.state.tensors import Inspector, dtype_of

__all__ = [
    "RNG",
    "FlatState",
    "Inspector",
    "LoadTarget",
    "Mismatch",
    "PerRank",
    "Read",
    "ResumableLoader",
    "StoredState",
    "StoredTensor",
    "TensorLeaf",
    "dtype_of",
    "flatten",
    "moments_nbytes",
    "per_rank",
    "read_tree",
    "wanted",
]
