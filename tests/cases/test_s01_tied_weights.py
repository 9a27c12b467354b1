"""S01: one parameter under two names, in the model and in its optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.distributed.models import assert_equal, whole
from tests.ranks import run_ranks

NAMES = ("emb.weight", "head.weight")


class Lm(nn.Module):
    """Embedding and output head of one shape; ``head_first`` declares them the other way round."""

    def __init__(self, *, tied: bool = True, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(6, 11, bias=False)
            self.emb = nn.Embedding(11, 6)
        else:
            self.emb = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N,) token ids to (N, 11) logits."""
        return self.head(self.emb(tokens))


def build(seed: int, **options: bool) -> dict[str, object]:
    torch.manual_seed(seed)
    model = Lm(**options)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(state: dict[str, object], step: int) -> torch.Tensor:
    """One step on a fixed batch; its loss."""
    tokens = torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(state["model"](tokens), tokens.roll(1))
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return loss.detach()


def numbers(state: dict[str, object]) -> dict[str, torch.Tensor]:
    """The weight under either name, and the optimizer's state of the parameter under either name."""
    found = {}
    for name in NAMES:
        parameter = state["model"].get_parameter(name)
        found[name] = whole(parameter.detach()).clone()
        for key, value in state["optimizer"].state[parameter].items():
            found[f"{name}/{key}"] = whole(value).clone()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], list[torch.Tensor]]:
    """A run with a tied model after 3 steps, what it held, and the losses of steps 4 to 6 without a stop."""
    run = tmp_path_factory.mktemp("s01") / "run"
    state = build(0)
    for step in (1, 2, 3):
        train(state, step)
    ckpt.save(run, 3, state, wait=True)
    expected = numbers(state)
    assert {name.partition("/")[2] for name in expected} == {"", "exp_avg", "exp_avg_sq", "step"}
    return run, expected, [train(state, step) for step in (4, 5, 6)]


def payload_nbytes(file: Path) -> int:
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


def test_s01_one_copy_is_stored(trained) -> None:
    """264 bytes of weights for both names, and one set of moments."""
    run, *_ = trained
    (folder,) = run.glob("step-*")
    (model,) = folder.glob("model-*.safetensors")
    (optimizer,) = folder.glob("optimizer-*.safetensors")
    assert payload_nbytes(model) == 11 * 6 * 4 == 264
    assert payload_nbytes(optimizer) == 2 * 264 + 4
    with safe_open(model, "pt") as opened:
        assert opened.keys() == ["emb.weight"]
    found = ckpt.read(run)
    assert found["model"]["head.weight"] is found["model"]["emb.weight"]


@pytest.mark.parametrize("head_first", [False, True], ids=["same order", "head first"])
def test_s01_a_tied_model_goes_on_as_if_never_stopped(trained, head_first: bool) -> None:
    """Sharing survives, everything is bit-equal, and so are the next losses; whichever name comes first."""
    run, expected, losses = trained
    state = build(9, head_first=head_first)
    parameter = state["model"].emb.weight
    ckpt.load(run, state)
    assert state["model"].head.weight is state["model"].emb.weight is parameter
    assert state["optimizer"].param_groups[0]["params"] == [parameter]
    assert_equal(numbers(state), expected)
    for step, loss in zip((4, 5, 6), losses, strict=True):
        assert torch.equal(train(state, step), loss)


def test_s01_an_untied_model_gets_both(trained) -> None:
    """Two parameters of their own, each with the numbers and the moments of the one that was saved."""
    run, expected, losses = trained
    state = build(9, tied=False)
    ckpt.load(run, state)
    model = state["model"]
    assert model.head.weight is not model.emb.weight
    assert model.head.weight.data_ptr() != model.emb.weight.data_ptr()
    assert len(state["optimizer"].state) == 2
    assert_equal(numbers(state), expected)
    assert torch.equal(train(state, 4), losses[0])  # from here on the two part
    assert not torch.equal(model.head.weight, model.emb.weight)


def test_s01_a_model_on_the_meta_device_stays_tied(trained) -> None:
    """What has no memory yet is filled as one, and its optimizer keeps hold of it."""
    run, expected, losses = trained
    with torch.device("meta"):
        state = build(9)
    ckpt.load(run, state)
    model = state["model"]
    assert model.head.weight is model.emb.weight
    assert state["optimizer"].param_groups[0]["params"][0] is model.emb.weight
    assert_equal(numbers(state), expected)
    assert torch.equal(train(state, 4), losses[0])


def test_s01_two_different_weights_do_not_go_into_one(trained, tmp_path: Path) -> None:
    """An untied step into a tied model would lose one of the two: refused, naming both, nothing changed."""
    ckpt.save(tmp_path / "run", 1, build(1, tied=False), wait=True)
    state = build(9)
    before = state["model"].emb.weight.detach().clone()
    with pytest.raises(ckpt.MismatchError, match=r"model\.head\.weight: a tensor of its own .* model\.emb\.weight"):
        ckpt.load(tmp_path / "run", state)
    assert torch.equal(state["model"].emb.weight, before)


def wrapped(kind: str, world: int) -> dict[str, object]:
    torch.manual_seed(9)
    model: nn.Module = Lm(tied=kind != "untied")
    bare = model
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}, bare


def on_two_ranks(rank: int, world: int, run: str, back: str) -> dict[str, tuple[bool, dict, torch.Tensor]]:
    """Load into each kind; whether it is tied, what it holds, and its next loss. Save FSDP's to ``back``."""
    outcomes = {}
    for kind in ("plain", "untied", "ddp", "fsdp"):
        state, bare = wrapped(kind, world)
        ckpt.load(run, state)
        if kind == "fsdp":
            ckpt.save(back, 3, state, wait=True)
        held = numbers({"model": bare, "optimizer": state["optimizer"]})
        outcomes[kind] = (bare.head.weight is bare.emb.weight, held, train(state, 4))
    return outcomes


def test_s01_one_rank_to_two_and_back(trained, tmp_path: Path) -> None:
    """Plain, untied, DDP and FSDP at W=2 hold the same and go on the same; FSDP's own save loads tied at W=1."""
    run, expected, losses = trained
    back = tmp_path / "back"
    for outcomes in run_ranks(2, on_two_ranks, str(run), str(back)):
        for kind, (tied, held, loss) in outcomes.items():
            assert tied == (kind != "untied"), kind
            assert_equal(held, expected)
            assert torch.equal(loss, losses[0]), kind
    files = list(back.glob("step-*/model-*.safetensors"))
    assert [payload_nbytes(file) for file in sorted(files)] == [6 * 6 * 4, 5 * 6 * 4]
    state = build(9)
    ckpt.load(back, state)
    assert state["model"].head.weight is state["model"].emb.weight
    assert_equal(numbers(state), expected)
