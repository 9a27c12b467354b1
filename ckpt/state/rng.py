"""The random generators of one process: Python's, numpy's, torch's on CPU and on every CUDA device."""

from __future__ import annotations

import hashlib
import importlib
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ckpt.errors import BadInputError
from ckpt.format.values import encode, values_digest

_MASK_63_BITS = 2**63 - 1


class RNG:
    """A leaf of a state that stands for this process's global random generators: ``{"rng": ckpt.RNG()}``.

    Each rank gets its own back. numpy's is saved when numpy is imported, CUDA's when CUDA is in use. At
    another world size no rank can go on with a saved stream without repeating or sharing numbers, so
    all are seeded anew: each generator of rank r of W from the SHA-256 of (the digests of all
    saved ranks' states in rank order, r, W, the generator's name). The same step loaded at the
    same W gives the same numbers, ranks differ, and no saved stream goes on.
    """

    ckpt_per_rank = True

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator, as plain values."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss": gauss},
            "torch": _bytes(torch.get_rng_state()),
        }
        if "numpy.random" in sys.modules:
            state["numpy"] = _plain(sys.modules["numpy.random"].get_state(legacy=False))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch has it so
            state["cuda"] = [_bytes(device) for device in torch.cuda.get_rng_state_all()]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators; those of CUDA devices that this process has not are left out."""
        python = state_dict["python"]
        words = struct.unpack(f"<{len(python['words']) // 4}I", python["words"])
        random.setstate((python["version"], words, python["gauss"]))
        torch.set_rng_state(_tensor(state_dict["torch"]))
        if "numpy" in state_dict:
            try:
                importlib.import_module("numpy.random").set_state(_arrays(state_dict["numpy"]))
            except ImportError:
                raise BadInputError("rng: the step has a state of numpy's generator; install numpy") from None
        if "cuda" in state_dict and torch.cuda.is_available():
            for index, device in enumerate(state_dict["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_tensor(device), index)

    def load_state_dicts(
        self, state_dicts: Sequence[dict[str, Any]], *, rank: int | None = None, world: int | None = None
    ) -> None:
        """Seed the generators from the states of all ranks of a job of another size, in rank order.

        ``rank`` and ``world`` default to those of the process group, else 0 and 1.
        """
        if rank is None or world is None:
            grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if grouped else 0
            world = torch.distributed.get_world_size() if grouped else 1
        digests = ",".join(values_digest(encode(state, "rng")) for state in state_dicts)

        def seed(generator: str) -> int:
            text = f"{digests}/{rank}/{world}/{generator}"
            return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & _MASK_63_BITS

        random.seed(seed("python"))
        torch.default_generator.manual_seed(seed("torch"))
        if any("numpy" in state for state in state_dicts) or "numpy.random" in sys.modules:
            importlib.import_module("numpy.random").seed(seed("numpy") % 2**32)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed("cuda"))


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    """The state of numpy with its arrays (of unsigned words) as typed bytes."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "ndim") and value.ndim:
        return {"dtype": value.dtype.str, "bytes": value.tobytes()}
    return value.item() if hasattr(value, "item") else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"dtype", "bytes"}:
        return importlib.import_module("numpy").frombuffer(value["bytes"], dtype=value["dtype"]).copy()
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return value
