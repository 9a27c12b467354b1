"""S04: shards of uneven size, ranks without a shard, and tensors without elements, from any world to any other."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt
from ckpt.run import Run
from tests.ranks import run_ranks

LENGTHS = (0, 1, 5, 6, 7)
SAVING, LOADING = (1, 2, 3, 4), (1, 2, 3, 4, 5)


def values() -> dict[str, torch.Tensor]:
    """Name -> the whole tensor: rows and columns of every length, one for a 2x2 mesh, and empty ones."""
    found = {f"rows {n}": torch.arange(n * 3).view(n, 3) for n in LENGTHS}
    found |= {f"columns {n}": torch.arange(n * 3).view(3, n) for n in LENGTHS}
    found |= {f"square {cut}": torch.arange(35.0).view(5, 7) for cut in ("S0 S1", "S1 S0", "S0 S0", "R S1", "S0 R")}
    return found | {"empty": torch.empty(0), "empty rows": torch.empty(0, 3, dtype=torch.int32)}


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def cut(whole: torch.Tensor, mesh: DeviceMesh, dims: list[int | None]) -> DTensor:
    """This rank's shard by the ``torch.chunk`` rule, one mesh dimension after the other; None replicates."""
    mine = whole
    for mesh_dim, (size, dim) in enumerate(zip(mesh.shape, dims, strict=True)):
        if dim is not None:
            pieces = mine.chunk(size, dim) if mine.shape[dim] else (mine,)
            coordinate = mesh.get_coordinate()[mesh_dim]
            mine = pieces[coordinate] if coordinate < len(pieces) else mine.narrow(dim, 0, 0)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(mine.clone(), mesh, placements, run_check=False, shape=shape, stride=stride)


def spread(world: int, wholes: dict[str, torch.Tensor], *, crosswise: bool = False) -> dict[str, torch.Tensor]:
    """Each whole tensor as this rank holds it. ``crosswise`` cuts rows where it cut columns and the reverse."""
    line, grid = mesh_of(world), mesh_of(2, 2) if world == 4 else None
    swap = {0: 1, 1: 0, None: None} if crosswise else {0: 0, 1: 1, None: None}
    words = {"S0": 0, "S1": 1, "R": None}
    state = {}
    for name, whole in wholes.items():
        kind, _, how = name.partition(" ")
        if name == "empty":
            state[name] = whole.clone()
        elif kind == "square":
            dims = [swap[words[word]] for word in how.split()]
            state[name] = cut(whole, grid, dims) if grid is not None else cut(whole, line, dims[:1])
        else:
            state[name] = cut(whole, line, [swap[1 if kind == "columns" else 0]])
    return state


def save(rank: int, world: int, run: str) -> None:
    """All of them in one step; and a single row in another run."""
    ckpt.save(run, 1, {"t": spread(world, values())}, wait=True)
    row = cut(values()["rows 1"], mesh_of(world), [0])
    ckpt.save(f"{run}-one-row", 1, {"only": row}, wait=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load(rank: int, world: int, folder: str) -> tuple[list[tuple[str, bool]], dict[str, torch.Tensor]]:
    """Every saving world's step into tensors of other numbers, cut the same way and crosswise.

    Each shard is compared with what ``torch.chunk`` cuts from the whole; the last load is gathered as well.
    """
    outcomes = []
    for saved_world in SAVING:
        for crosswise in (False, True):
            others = {name: torch.full_like(whole, -1) for name, whole in values().items()}
            state = {"t": spread(world, others, crosswise=crosswise)}
            report = ckpt.load(f"{folder}/{saved_world}", state)
            assert report.missing == report.unexpected == report.mismatched == ()
            for name, tensor in spread(world, values(), crosswise=crosswise).items():
                found, expected = local(state["t"][name]), local(tensor)
                equal = found.dtype == expected.dtype and torch.equal(found, expected)
                outcomes.append((f"{name}: W={saved_world}, W2={world}, crosswise={crosswise}", equal))
    gathered = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state["t"].items()}
    return outcomes, gathered


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run per saving world."""
    path = tmp_path_factory.mktemp("s04")
    for world in SAVING:
        run_ranks(world, save, str(path / str(world)))
    return path


@pytest.mark.parametrize("world", LOADING)
def test_s04_uneven_rows_every_world(folder: Path, world: int) -> None:
    """Every (length, W, W2), every placement: each rank's shard is its part of the saved numbers."""
    for outcomes, gathered in run_ranks(world, load, str(folder)):
        assert len(outcomes) == 2 * len(SAVING) * len(values())
        assert [where for where, equal in outcomes if not equal] == []
        for name, whole in values().items():
            assert torch.equal(gathered[name], whole), name


def test_s04_ranks_that_own_nothing_take_part(folder: Path) -> None:
    """Each rank has its part in the step, the shards make up the tensors, and a read needs no ranks at all."""
    for world in SAVING:
        run = folder / str(world)
        found = Run.open(run).find()
        assert found.commit is not None
        assert len(found.commit.parts) == world
        assert ckpt.verify(run).ok
        tensors = ckpt.read(run)["t"]
        for name, whole in values().items():
            assert tensors[name].dtype == whole.dtype
            assert torch.equal(tensors[name], whole), (world, name)


def test_s04_a_step_that_only_one_rank_has_bytes_for(folder: Path) -> None:
    """One row on four ranks: three write no data file, and the step is whole."""
    run = folder / "4-one-row"
    assert len(list(run.glob("step-*/state-*"))) == 1
    assert len(list(run.glob("step-*/part-*"))) == 4
    assert ckpt.verify(run).ok
    assert torch.equal(ckpt.read(run)["only"], values()["rows 1"])
