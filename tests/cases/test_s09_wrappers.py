"""S09: names on disk are the bare model's, whatever wraps it, and any wrapping loads into any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.distributed.models import whole
from tests.ranks import run_ranks

NAMES = ["0.bias", "0.weight", "1.0.bias", "1.0.weight"]


def bare(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def child(model: nn.Sequential, *wrappers) -> nn.Module:
    for wrap in wrappers:
        model[1] = wrap(model[1])
    return model


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


FORMS = {
    "plain": lambda model: model,
    "compile": compiled,
    "ddp": nn.parallel.DistributedDataParallel,
    "checkpoint(child)": lambda model: child(model, checkpoint_wrapper),
    "checkpoint(compile(child))": lambda model: child(model, compiled, checkpoint_wrapper),
    "fsdp": sharded,
    "ddp(compile(checkpoint(child)))": lambda model: nn.parallel.DistributedDataParallel(
        compiled(child(model, checkpoint_wrapper))
    ),
}


def build(form: str, seed: int) -> dict[str, object]:
    """The model in one form, its optimizer, and the bare parameters in order of declaration."""
    model = bare(seed)
    wrapped = FORMS[form](model)
    return {"model": wrapped, "optimizer": torch.optim.AdamW(wrapped.parameters(), lr=1e-2)}


def train(state: dict[str, object]) -> None:
    for number in (1, 2):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        state["model"](batch).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def numbers(state: dict[str, object]) -> list[dict[str, torch.Tensor]]:
    """Each parameter and its moments, in order of declaration: wrapping does not change that."""
    found = []
    for parameter in state["model"].parameters():
        moments = {key: whole(value).clone() for key, value in state["optimizer"].state[parameter].items()}
        found.append({"": whole(parameter.detach()).clone(), **moments})
    return found


def all_into_all(rank: int, world: int, folder: str) -> tuple[dict, dict, dict]:
    """Train and save every form, load each into each; what was trained, saved and loaded."""
    trained, loaded, reports = {}, {}, {}
    for index, form in enumerate(FORMS):
        state = build(form, 0)
        train(state)
        trained[form] = numbers(state)
        ckpt.save(f"{folder}/{index}", 1, state, wait=True)
    for index, source in enumerate(FORMS):
        for target in FORMS:
            state = build(target, 9)
            report = ckpt.load(f"{folder}/{index}", state)
            loaded[source, target] = numbers(state)
            reports[source, target] = (*report.missing, *report.unexpected, *report.mismatched, *report.ignored)
    return trained, loaded, reports


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict, dict]:
    folder = tmp_path_factory.mktemp("s09")
    (found,) = run_ranks(1, all_into_all, str(folder))
    return folder, *found


def test_s09_any_wrapping_loads_into_any_other(outcome) -> None:
    """Parameters and moments, every form into every form, with nothing missing and nothing left over."""
    _, trained, loaded, reports = outcome
    assert len(loaded) == len(FORMS) ** 2
    for (source, target), found in loaded.items():
        assert reports[source, target] == ()
        assert len(found) == len(NAMES)
        for ours, theirs in zip(found, trained[source], strict=True):
            assert ours.keys() == theirs.keys() == {"", "step", "exp_avg", "exp_avg_sq"}
            for key, tensor in theirs.items():
                assert torch.equal(ours[key], tensor), (source, target, key)


def test_s09_names_on_disk_are_canonical(outcome) -> None:
    """No wrapper's word stands in a key of a file, in the Hugging Face index's names or in what is read."""
    folder, *_ = outcome
    for index, form in enumerate(FORMS):
        run = folder / str(index)
        (model,) = run.glob("step-*/model-*.safetensors")
        with safe_open(model, "pt") as opened:
            assert sorted(opened.keys()) == NAMES, form
        (optimizer,) = run.glob("step-*/optimizer-*.safetensors")
        with safe_open(optimizer, "pt") as opened:
            keys = sorted(f"state.{key}.model.{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in NAMES)
            assert sorted(opened.keys()) == keys, form
        found = ckpt.read(run)
        assert sorted(found["model"]) == NAMES
        assert sorted(found["optimizer"]["state"]) == [f"model.{name}" for name in NAMES]


class Named(nn.Module):
    """Attributes of one's own that are called like those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self._checkpoint_wrapped_module = nn.Sequential(nn.Linear(2, 2))
        self.module.module = nn.Linear(2, 2, bias=False)


OWN_NAMES = [
    *("_checkpoint_wrapped_module.0.bias", "_checkpoint_wrapped_module.0.weight"),
    *("_orig_mod.bias", "_orig_mod.weight", "module.bias", "module.module.weight", "module.weight"),
]


def own_names(rank: int, world: int, folder: str) -> list[bool]:
    """Saved in three forms, each loaded into each."""
    forms = (
        lambda model: model,
        lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
        lambda model: checkpoint_wrapper(model),
    )
    expected = Named()
    for index, form in enumerate(forms):
        model = Named()
        model.load_state_dict(expected.state_dict())
        ckpt.save(f"{folder}/{index}", 1, {"model": form(model)}, wait=True)
    equal = []
    for index in range(len(forms)):
        for form in forms:
            model = Named()
            ckpt.load(f"{folder}/{index}", {"model": form(model)})
            equal += [torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True)]
    return equal


def test_s09_a_real_attribute_called_module_is_kept(tmp_path: Path) -> None:
    """Only a wrapper's own component goes, by its type and not by its word."""
    (equal,) = run_ranks(1, own_names, str(tmp_path))
    assert len(equal) == 9 * len(OWN_NAMES)
    assert all(equal)
    for index in range(3):
        assert sorted(ckpt.read(tmp_path / str(index))["model"]) == OWN_NAMES


def test_s09_names_that_do_not_fit_are_never_silent(tmp_path: Path) -> None:
    """A model that only looks wrapped is another model: every name is reported, and nothing is filled."""
    own = nn.Module()
    own.module = bare(0)
    ckpt.save(tmp_path / "run", 1, {"model": own}, wait=True)
    target = bare(9)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(tmp_path / "run", {"model": target})
    for name in NAMES:
        assert f"    model.{name}\n" in str(caught.value)
        assert f"    model.module.{name}\n" in str(caught.value)
        assert torch.equal(target.state_dict()[name], before[name])
