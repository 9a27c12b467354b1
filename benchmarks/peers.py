"""Others who save and load the same job, each by its own usual way, and which of them are installed here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from workload import Job

Load = Callable[[Path], None]


def nothing() -> None:
    """What is left to wait for after a save that has waited itself."""


@dataclass(frozen=True)
class Peer:
    """One way to save, and the ways to load what it has written."""

    name: str
    save: Callable[[Path], Callable[[], object]]  # into a folder that does not exist; the result waits for the end
    durable: bool  # whether the bytes are on the disk then; else they lie in the page cache
    asynchronous: bool = False
    loads: Mapping[str, Load] = field(default_factory=dict)  # by the reader's name; each fills the target's tensors


OPTIONAL = {
    "torchsnapshot": "torchsnapshot",
    "fastsafetensors": "fastsafetensors",
    "runai-model-streamer": "runai_model_streamer",
}


def missing() -> list[str]:
    """The optional peers that are not installed, by package name."""
    return [package for package, module in OPTIONAL.items() if find_spec(module) is None]


def file_peers(job: Job, target: Job) -> list[Peer]:
    """torch.save and safetensors, a file for each rank; torchsnapshot; and other readers of safetensors."""
    readers: dict[str, Load] = {"safetensors": lambda folder: _read_safetensors(folder, target)}
    if find_spec("fastsafetensors"):
        readers["fastsafetensors"] = lambda folder: _read_fastsafetensors(folder, target)
    if find_spec("runai_model_streamer"):
        readers["run:ai streamer"] = lambda folder: _read_runai(folder, target)
    found = [
        Peer(
            "torch.save",
            lambda folder: _write_torch(folder, job),
            durable=False,
            loads={"torch.load": lambda folder: _read_torch(folder, target)},
        ),
        Peer("safetensors", lambda folder: _write_safetensors(folder, job), durable=False, loads=readers),
    ]
    if find_spec("torchsnapshot"):
        found += _torchsnapshot(job, target)
    return found


def _own(folder: Path, suffix: str) -> str:
    """This rank's file."""
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"rank-{dist.get_rank()}.{suffix}")


def _fill(target: Job, found: Mapping[str, Tensor]) -> None:
    """What a restart needs in the end: the bytes in the tensors that train."""
    with torch.no_grad():
        for name, tensor in target.named_tensors().items():
            tensor.copy_(found[name])


def _write_torch(folder: Path, job: Job) -> Callable[[], object]:
    torch.save(job.named_tensors(), _own(folder, "pt"))
    return nothing


def _read_torch(folder: Path, target: Job) -> None:
    _fill(target, torch.load(_own(folder, "pt"), weights_only=True))


def _write_safetensors(folder: Path, job: Job) -> Callable[[], object]:
    from safetensors.torch import save_file

    save_file(job.named_tensors(), _own(folder, "safetensors"))
    return nothing


def _read_safetensors(folder: Path, target: Job) -> None:
    from safetensors.torch import load_file

    _fill(target, load_file(_own(folder, "safetensors")))


def _read_fastsafetensors(folder: Path, target: Job) -> None:
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
    loader.add_filenames({0: [_own(folder, "safetensors")]})
    buffer = loader.copy_files_to_device()
    _fill(target, {name: buffer.get_tensor(name) for name in target.named_tensors()})
    buffer.close()
    loader.close()


def _read_runai(folder: Path, target: Job) -> None:
    from runai_model_streamer import SafetensorsStreamer

    places = target.named_tensors()
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(_own(folder, "safetensors"))
        for name, tensor in streamer.get_tensors():  # its memory is used again for the next ones
            places[name].copy_(tensor)


def _torchsnapshot(job: Job, target: Job) -> list[Peer]:
    """It knows no DTensor, so each rank's shards are given as tensors of its own, which it writes per rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts a function with torch.jit, which is deprecated
        from torchsnapshot import Snapshot, StateDict

    def state(of: Job) -> dict[str, Any]:
        return {"train": StateDict(**of.named_tensors())}

    def take(folder: Path) -> Callable[[], object]:
        Snapshot.take(str(folder), state(job))
        return nothing

    def async_take(folder: Path) -> Callable[[], object]:
        wait: Callable[[], object] = Snapshot.async_take(str(folder), state(job)).wait
        return wait

    def restore(folder: Path) -> None:
        Snapshot(str(folder)).restore(state(target))  # in place, where shapes agree

    return [
        Peer("torchsnapshot", take, durable=False, loads={"torchsnapshot": restore}),
        Peer("torchsnapshot async", async_take, durable=False, asynchronous=True),
    ]
