"""Systems that save and load a small sharded state, each in its usual way, for ``faults.py``. Runs in rank processes.

A restart takes each system's newest checkpoint as careful recipes do: the highest step whose folder is complete as
far as the system itself marks that (``.metadata``, ``.snapshot_metadata``, a file for every rank).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2
TENSORS = 8
Wait = Callable[[], object]
State = dict[str, torch.Tensor]


def filled(step: int, rank: int) -> float:
    """What every element of rank ``rank``'s shards is at step ``step``; exact in float32."""
    return step * 10.0 + rank


def make(step: int, rank: int, numel: int) -> State:
    """A rank's shards."""
    return {f"layer{i}": torch.full((numel,), filled(step, rank)) for i in range(TENSORS)}


class System:
    """One way to save; ``root`` holds all of a job's checkpoints, ``name`` is ``step-`` and a number."""

    label = ""
    metadata: tuple[str, ...] = ()  # patterns of small files that say what lies where

    def save(self, root: Path, name: str, state: State) -> None:
        """Save, and wait until it is done."""
        raise NotImplementedError

    def async_save(self, root: Path, name: str, state: State) -> Wait:
        """Save in the background; the result waits."""
        raise NotImplementedError

    def load(self, root: Path, state: State) -> None:
        """Fill ``state`` from the newest. Raises what the system raises."""
        raise NotImplementedError

    def _newest(self, root: Path, complete: Callable[[Path], bool]) -> Path:
        found = [(int(path.name.partition("-")[2]), path) for path in root.iterdir() if complete(path)]
        if not found:
            raise FileNotFoundError(f"no complete checkpoint in {root}")
        return max(found)[1]


class Ckpt(System):
    """``ckpt.save`` and ``ckpt.load`` on one run; a name that comes again is the same step, saved again."""

    label = "ckpt"
    metadata = ("COMMIT", "part-*.json")
    parity = 0

    def save(self, root: Path, name: str, state: State) -> None:
        """Waits until the step is committed."""
        import ckpt

        ckpt.save(root, int(name.partition("-")[2]), self._state(state), wait=True, parity=self.parity)

    def async_save(self, root: Path, name: str, state: State) -> Wait:
        """As it is by default."""
        import ckpt

        pending = ckpt.save(root, int(name.partition("-")[2]), self._state(state), parity=self.parity)
        return pending.result

    def load(self, root: Path, state: State) -> None:
        """The latest step; it fills sharded tensors, which share memory with ``state``."""
        import ckpt

        ckpt.load(root, self._state(state))

    def _state(self, state: State) -> dict[str, Any]:
        return {"model": _sharded(state)}


class CkptParity(Ckpt):
    """The same with one parity file per node."""

    label = "ckpt parity=1"
    parity = 1


class Dcp(System):
    """``torch.distributed.checkpoint`` with DTensors, a folder for every step."""

    label = "dcp"
    metadata = (".metadata",)

    def save(self, root: Path, name: str, state: State) -> None:
        """``dcp.save``."""
        from torch.distributed.checkpoint import state_dict_saver

        state_dict_saver.save(_sharded(state), checkpoint_id=root / name)

    def async_save(self, root: Path, name: str, state: State) -> Wait:
        """``dcp.async_save`` with nothing but its defaults."""
        from torch.distributed.checkpoint import state_dict_saver

        future: Any = state_dict_saver.async_save(_sharded(state), checkpoint_id=root / name)
        wait: Wait = future.result
        return wait

    def load(self, root: Path, state: State) -> None:
        """``dcp.load`` of the newest folder that has metadata."""
        from torch.distributed.checkpoint import state_dict_loader

        newest = self._newest(root, lambda path: (path / ".metadata").exists())
        state_dict_loader.load(_sharded(state), checkpoint_id=newest)


class TorchSnapshot(System):
    """``Snapshot.take`` and ``restore`` of each rank's local shards."""

    label = "torchsnapshot"
    metadata = (".snapshot_metadata",)

    def save(self, root: Path, name: str, state: State) -> None:
        """``Snapshot.take``."""
        snapshot, wrapped = self._of(state)
        snapshot.take(str(root / name), wrapped)

    def async_save(self, root: Path, name: str, state: State) -> Wait:
        """``Snapshot.async_take``."""
        snapshot, wrapped = self._of(state)
        wait: Wait = snapshot.async_take(str(root / name), wrapped).wait
        return wait

    def load(self, root: Path, state: State) -> None:
        """``restore`` of the newest folder that has metadata."""
        snapshot, wrapped = self._of(state)
        newest = self._newest(root, lambda path: (path / ".snapshot_metadata").exists())
        snapshot(str(newest)).restore(wrapped)

    @staticmethod
    def _of(state: State) -> tuple[Any, dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchsnapshot import Snapshot, StateDict

        return Snapshot, {"train": StateDict(**state)}


class Torch(System):
    """``torch.save`` of each rank's local shards into a file of its own."""

    label = "torch.save"
    metadata = ("rank-1.pt",)

    def save(self, root: Path, name: str, state: State) -> None:
        """As most training scripts have it."""
        (root / name).mkdir(parents=True, exist_ok=True)
        torch.save(state, root / name / f"rank-{dist.get_rank()}.pt")

    def async_save(self, root: Path, name: str, state: State) -> Wait:
        """It has none: saves, and nothing is left to wait for."""
        self.save(root, name, state)
        return lambda: None

    def load(self, root: Path, state: State) -> None:
        """The newest folder that has a file of every rank."""
        newest = self._newest(root, lambda path: len(list(path.glob("rank-*.pt"))) == dist.get_world_size())
        found = torch.load(newest / f"rank-{dist.get_rank()}.pt", weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(found[name])


SYSTEMS: dict[str, type[System]] = {
    "ckpt": Ckpt,
    "ckpt+parity": CkptParity,
    "dcp": Dcp,
    "torchsnapshot": TorchSnapshot,
    "torch": Torch,
}


def _sharded(state: State) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}


@contextlib.contextmanager
def process_group(rendezvous: str, rank: int, world: int) -> Iterator[None]:
    """A gloo group over a file, with torch's usual time-out."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


class Bomb:
    """Unpickling it makes a file: the sign that code of a checkpoint has run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)
