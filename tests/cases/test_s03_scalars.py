"""S03: 0-dim and one-element tensors, sync and async, at any world size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt
from tests.ranks import run_ranks

MODES = ("sync", "async")


def scalars() -> dict[str, torch.Tensor]:
    return {
        "float": torch.tensor(3.5),
        "int": torch.tensor(7),
        "nan": torch.tensor(float("nan")),
        "minus zero": torch.tensor(-0.0),
        "parameter": nn.Parameter(torch.tensor([2.0])),
        "one by one": torch.ones(1, 1),
        "true": torch.tensor(True),
        "double": torch.tensor(0.1, dtype=torch.float64),
    }


class Scale(nn.Module):
    """A 0-dim parameter, a one-element one, and a 0-dim buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(value))
        self.bias = nn.Parameter(torch.tensor([value]))
        self.register_buffer("count", torch.tensor(int(value)))


def spread(world: int, value: float) -> dict[str, DTensor]:
    """One element over all ranks: most hold none of it. And a 0-dim tensor, replicated."""
    mesh = init_device_mesh("cpu", (world,))
    mine = torch.full((1 if mesh.get_rank() == 0 else 0,), value)
    return {
        "sharded": DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=torch.Size([1]), stride=(1,)),
        "replicated": DTensor.from_local(torch.tensor(value), mesh, [Replicate()], run_check=False),
    }


def build(world: int, value: float, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    model = Scale(value)
    optimizer = torch.optim.Adam(model.parameters())
    (model.gain * 2 + model.bias.sum()).backward()
    optimizer.step()
    return {"tensors": tensors, "model": model, "optimizer": optimizer, "spread": spread(world, value)}


def save(rank: int, world: int, run: str) -> None:
    """Step 1 waits for the commit; step 2 goes on at once, and spoils everything before it waits."""
    for step, mode in enumerate(MODES, start=1):
        state = build(world, 5.0, scalars())
        pending = ckpt.save(run, step, state, wait=mode == "sync")
        with torch.no_grad():
            for tensor in (*state["tensors"].values(), *state["model"].parameters()):
                tensor.zero_()
        pending.result()


def load(rank: int, world: int, runs: list[str]) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Every step of every run, loaded here."""
    outcomes = []
    for run in runs:
        for step, mode in enumerate(MODES, start=1):
            state = build(world, 1.0, {name: torch.zeros_like(tensor) for name, tensor in scalars().items()})
            held = dict(state["tensors"])
            ckpt.load(run, state, step=step)
            assert all(state["tensors"][name] is tensor for name, tensor in held.items())
            found = dict(state["tensors"])
            found |= {f"model.{name}": t.detach() for name, t in state["model"].state_dict().items()}
            for name, parameter in state["model"].named_parameters():
                found |= {f"{name}/{key}": t for key, t in state["optimizer"].state[parameter].items()}
            found |= {f"spread.{name}": t.full_tensor() for name, t in state["spread"].items()}
            outcomes.append((f"{run} {mode}", found))
    return outcomes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers of the same size: NaN and -0.0 are told apart."""
    width = {1: torch.uint8, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(width)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Saved at W=1 and at W=2."""
    folder = tmp_path_factory.mktemp("s03")
    for world in (1, 2):
        run_ranks(world, save, str(folder / f"w{world}"))
    return [folder / "w1", folder / "w2"]


def expected() -> dict[str, torch.Tensor]:
    found = dict(scalars())
    model = Scale(5.0)
    optimizer = torch.optim.Adam(model.parameters())
    (model.gain * 2 + model.bias.sum()).backward()
    optimizer.step()
    found |= {f"model.{name}": t for name, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": t for key, t in optimizer.state[parameter].items()}
    return found | {"spread.sharded": torch.tensor([5.0]), "spread.replicated": torch.tensor(5.0)}


def assert_bits(found: dict[str, torch.Tensor], where: str) -> None:
    wanted = expected()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, (where, name)
        assert found[name].dtype == tensor.dtype, (where, name)
        assert torch.equal(bits(found[name]), bits(tensor)), (where, name)


@pytest.mark.parametrize("world", [3, 1])
def test_s03_scalars_at_any_world(runs: list[Path], world: int) -> None:
    """Shape, dtype and bits are kept, from W=1 and W=2, saved sync and async."""
    for outcomes in run_ranks(world, load, [str(run) for run in runs]):
        assert len(outcomes) == 4
        for where, found in outcomes:
            assert_bits(found, where)


def test_s03_scalars_read_without_a_template(runs: list[Path]) -> None:
    """The same bits again, and one element is stored once, not once a rank."""
    for run in runs:
        assert ckpt.verify(run).ok
        for step in (1, 2):
            found = ckpt.read(run, step=step)
            for name, tensor in scalars().items():
                assert found["tensors"][name].shape == tensor.shape
                assert torch.equal(bits(found["tensors"][name]), bits(tensor))
            assert torch.equal(found["spread"]["sharded"], torch.tensor([5.0]))
            assert found["model"]["count"].shape == ()
