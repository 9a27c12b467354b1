"""S08: moments go by the name of their parameter, whatever order, group or position it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt

NAMES = ("p1.weight", "p1.bias", "p2.weight", "p2.bias")


class Pair(nn.Module):
    """Two layers of one shape on purpose, declared in either order."""

    def __init__(self, order: tuple[str, str] = ("p1", "p2")) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3) to (N, 3)."""
        return self.p2(torch.tanh(self.p1(x)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_groups(model: Pair, first: str, second: str) -> torch.optim.Optimizer:
    """One group per layer, with settings of its own."""
    rates = {"p1": 1e-2, "p2": 3e-3}
    groups = [{"params": list(getattr(model, name).parameters()), "lr": rates[name]} for name in (first, second)]
    return torch.optim.Adam(groups, lr=1.0)


def trained(*, groups: bool) -> tuple[Pair, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Pair()
    optimizer = in_groups(model, "p1", "p2") if groups else torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in (1, 2):
        step(model, optimizer, number)
    return model, optimizer


def assert_same_by_name(
    found: nn.Module, found_optimizer: torch.optim.Optimizer, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    for name in NAMES:
        ours, theirs = found.get_parameter(name), model.get_parameter(name)
        assert torch.equal(ours, theirs), name
        assert found_optimizer.state[ours].keys() == optimizer.state[theirs].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(found_optimizer.state[ours][key], value), (name, key)


def rate_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> float:
    (rate,) = [
        group["lr"] for group in optimizer.param_groups if any(candidate is parameter for candidate in group["params"])
    ]
    return rate


def test_s08_layers_declared_in_another_order(tmp_path: Path) -> None:
    """B.p1 has A.p1's moments, and both go on to the same numbers."""
    model, optimizer = trained(groups=False)
    assert not torch.equal(*(optimizer.state[p]["exp_avg"] for p in (model.p1.weight, model.p2.weight)))
    ckpt.save(tmp_path / "run", 2, {"model": model, "optimizer": optimizer}, wait=True)
    other = Pair(("p2", "p1"))
    fresh = torch.optim.Adam(other.parameters(), lr=1.0)
    assert fresh.param_groups[0]["params"][0] is other.p2.weight
    ckpt.load(tmp_path / "run", {"model": other, "optimizer": fresh})
    assert_same_by_name(other, fresh, model, optimizer)
    assert fresh.param_groups[0]["params"][0] is other.p2.weight
    for number in (3, 4):
        step(model, optimizer, number)
        step(other, fresh, number)
    assert_same_by_name(other, fresh, model, optimizer)


@pytest.mark.parametrize("declared", [("p1", "p2"), ("p2", "p1")], ids="-".join)
def test_s08_parameter_groups_swapped(tmp_path: Path, declared: tuple[str, str]) -> None:
    """Groups the other way round: moments and settings follow the parameters."""
    model, optimizer = trained(groups=True)
    ckpt.save(tmp_path / "run", 2, {"model": model, "optimizer": optimizer}, wait=True)
    other = Pair(declared)
    fresh = in_groups(other, "p2", "p1")
    for group in fresh.param_groups:
        group["lr"] = 9.0
    ckpt.load(tmp_path / "run", {"model": other, "optimizer": fresh})
    assert_same_by_name(other, fresh, model, optimizer)
    assert [rate_of(fresh, p) for p in (other.p1.weight, other.p2.bias)] == [1e-2, 3e-3]
    step(model, optimizer, 3)
    step(other, fresh, 3)
    assert_same_by_name(other, fresh, model, optimizer)


def test_s08_parameters_in_another_grouping(tmp_path: Path) -> None:
    """Moments and settings are by parameter, so groups may be split; two that differ cannot become one: refused."""
    model, optimizer = trained(groups=True)
    ckpt.save(tmp_path / "run", 2, {"model": model, "optimizer": optimizer}, wait=True)
    other = Pair()
    split = torch.optim.Adam([{"params": [parameter]} for parameter in reversed(list(other.parameters()))], lr=1.0)
    ckpt.load(tmp_path / "run", {"model": other, "optimizer": split})
    assert_same_by_name(other, split, model, optimizer)
    assert [group["lr"] for group in split.param_groups] == [3e-3, 3e-3, 1e-2, 1e-2]
    joined = torch.optim.Adam(Pair().parameters(), lr=1.0)
    with pytest.raises(ckpt.BadInputError, match="belongs to no module"):
        ckpt.load(tmp_path / "run", {"optimizer": joined})
    another = Pair()
    joined = torch.optim.Adam(another.parameters(), lr=1.0)
    with pytest.raises(ckpt.MismatchError, match=r"parameters of the groups 0, 1, whose settings differ"):
        ckpt.load(tmp_path / "run", {"model": another, "optimizer": joined})
    assert joined.param_groups[0]["lr"] == 1.0
    assert not joined.state


def test_s08_an_optimizer_whose_names_cannot_be_known(tmp_path: Path) -> None:
    """Its parameters are in no module of the state: saving and loading raise, naming the first; nothing is swapped."""
    model, optimizer = trained(groups=False)
    run = tmp_path / "run"
    with pytest.raises(ckpt.UnsupportedValueError, match=r"optimizer: parameter 0 of group 0, of shape \(3, 3\)"):
        ckpt.save(run, 1, {"optimizer": optimizer}, wait=True)
    assert not list(run.rglob("step-*"))
    ckpt.save(run, 2, {"model": model, "optimizer": optimizer}, wait=True)
    other = Pair(("p2", "p1"))
    fresh = torch.optim.Adam(other.parameters())
    with pytest.raises(ckpt.UnsupportedValueError, match="its name is not known"):
        ckpt.load(run, {"optimizer": fresh})
    assert not fresh.state


def test_s08_names_that_the_optimizer_itself_knows(tmp_path: Path) -> None:
    """Built from ``named_parameters()``, it is saved and loaded without its module, in any order."""
    model, _ = trained(groups=False)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=1e-2)
    step(model, optimizer, 1)
    ckpt.save(tmp_path / "run", 1, {"optimizer": optimizer}, wait=True)
    other = Pair(("p2", "p1"))
    other.load_state_dict(model.state_dict())
    fresh = torch.optim.Adam(other.named_parameters(), lr=1.0)
    ckpt.load(tmp_path / "run", {"optimizer": fresh})
    assert_same_by_name(other, fresh, model, optimizer)
