"""Any world size and any placement reads any other, bit for bit when gathered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.run import Run
from tests.distributed.models import Net, assert_equal, build, gathered, train
from tests.ranks import run_ranks


def save_trained(rank: int, world: int, run: str, kind: str, width: int) -> dict[str, torch.Tensor] | None:
    """Train three steps, save, and give rank 0's gathered state."""
    model, optimizer = build(kind, world, width=width)
    train(model, optimizer, rank, world, steps=3)
    ckpt.save(run, 3, {"model": model, "optimizer": optimizer}).result()
    state = gathered(model, optimizer)
    return state if rank == 0 else None


def load_other(rank: int, world: int, run: str, kind: str, width: int) -> tuple[dict[str, torch.Tensor] | None, int]:
    """Load into a model of other numbers, and give rank 0's gathered state and this rank's bytes read."""
    model, optimizer = build(kind, world, seed=77, width=width)
    report = ckpt.load(run, {"model": model, "optimizer": optimizer})
    state = gathered(model, optimizer)
    return (state if rank == 0 else None), report.bytes_read


CHAINS: list[list[tuple[int, str]]] = [
    [(4, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp")],
    [(2, "fsdp"), (1, "plain"), (2, "ddp"), (3, "fsdp")],
    [(4, "fsdp_tp"), (2, "tp"), (4, "hsdp"), (1, "plain"), (4, "fsdp_tp")],
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(f"{kind}{world}" for world, kind in chain))
def test_chain_of_reshards(tmp_path: Path, chain: list[tuple[int, str]]) -> None:
    """Saved by the first, loaded by the next, saved again, and so on: the gathered state never changes."""
    (world, kind), *rest = chain
    width = 8 if any("tp" in k for _, k in chain) else 7
    expected = run_ranks(world, save_trained, str(tmp_path / "0"), kind, width)[0]
    for i, (next_world, next_kind) in enumerate(rest):
        found = run_ranks(
            next_world, reload_and_save, str(tmp_path / str(i)), str(tmp_path / str(i + 1)), next_kind, width
        )
        assert_equal(found[0], expected)
        assert ckpt.verify(tmp_path / str(i + 1)).ok


def reload_and_save(
    rank: int, world: int, source: str, target: str, kind: str, width: int
) -> dict[str, torch.Tensor] | None:
    """Load from one run, save to another."""
    model, optimizer = build(kind, world, seed=77, width=width)
    ckpt.load(source, {"model": model, "optimizer": optimizer})
    ckpt.save(target, 3, {"model": model, "optimizer": optimizer}, wait=True)
    state = gathered(model, optimizer)
    return state if rank == 0 else None


def test_ddp_folder_is_a_hugging_face_folder(tmp_path: Path) -> None:
    """Whole model tensors: the index names each tensor's file, and safetensors alone reads them."""
    expected = run_ranks(2, save_trained, str(tmp_path / "run"), "ddp", 7)[0]
    (folder,) = (tmp_path / "run").glob("step-*")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], expected[name])
    assert sorted(index["weight_map"]) == ["first.bias", "first.weight", "scale", "second.bias", "second.weight"]


def test_each_rank_reads_about_its_share(tmp_path: Path) -> None:
    """On the same topology the bytes read are the bytes needed."""
    run_ranks(2, save_trained, str(tmp_path / "run"), "fsdp", 64)
    outcomes = run_ranks(2, load_other, str(tmp_path / "run"), "fsdp", 64)
    elements = 64 * 5 + 64 + 3 * 64 + 3 + 1
    for _, bytes_read in outcomes:
        assert bytes_read < (elements * 3 * 4) / 2 * 1.3


def differing_value(rank: int, world: int, run: str) -> str:
    """A plain value that is not the same on all ranks."""
    try:
        ckpt.save(run, 1, {"x": torch.zeros(2), "cursor": rank})
    except ckpt.BadInputError as error:
        return str(error)
    return ""


def test_a_value_that_differs_between_ranks_is_refused_by_name(tmp_path: Path) -> None:
    """On every rank, before a byte is written."""
    for message in run_ranks(2, differing_value, str(tmp_path / "run")):
        assert "state['cursor']" in message
        assert "per_rank" in message
    assert not list((tmp_path / "run").glob("step-*"))


def differing_tensor(rank: int, world: int, run: str) -> str:
    """A plain tensor that is not the same on all ranks."""
    try:
        ckpt.save(run, 1, {"t": {"mine": torch.full((2,), float(rank)), "same": torch.ones(2)}})
    except ckpt.BadInputError as error:
        return str(error)
    return ""


def test_a_plain_tensor_that_differs_between_ranks_is_refused_by_name(tmp_path: Path) -> None:
    """Its bytes would be saved once, and which rank's would be chance."""
    for message in run_ranks(2, differing_tensor, str(tmp_path / "run")):
        assert "t.mine (ranks 0 and 1)" in message
        assert "t.same" not in message


def per_rank_round_trip(rank: int, world: int, run: str) -> Any:
    """Each rank's own value and tensor."""
    state = {"own": ckpt.per_rank({"n": rank, "t": torch.full((3,), float(rank))}), "all": 5}
    ckpt.save(run, 1, state, wait=True)
    target = {"own": ckpt.per_rank({"n": -1, "t": torch.zeros(3)}), "all": 0}
    ckpt.load(run, target)
    value = target["own"].value
    return value["n"], value["t"].tolist(), target["all"]


def test_per_rank_values_return_to_their_rank(tmp_path: Path) -> None:
    """At the same world size."""
    assert run_ranks(2, per_rank_round_trip, str(tmp_path / "run")) == [(0, [0.0] * 3, 5), (1, [1.0] * 3, 5)]


def stages(rank: int, world: int, run: str) -> list[str]:
    """Two pipeline stages: each rank has other names."""
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[f"layer{rank}"](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ckpt.save(run, 1, {"model": model, "optimizer": optimizer, "epoch": 2}, wait=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckpt.load(run, {"model": model, "optimizer": optimizer, "epoch": 0})
    return [k for k, v in model.state_dict().items() if torch.equal(v, before[k])]


def test_pipeline_stages_have_layouts_of_their_own(tmp_path: Path) -> None:
    """Ranks of other structure save and load in one step; the whole model reads as one."""
    assert run_ranks(2, stages, str(tmp_path / "run")) == [
        ["layer0.weight", "layer0.bias"],
        ["layer1.weight", "layer1.bias"],
    ]
    found = Run.open(tmp_path / "run").find()
    assert found.commit is not None
    assert len(found.commit.layouts) == 2
    assert sorted(ckpt.read(tmp_path / "run")["model"]) == [
        "layer0.bias",
        "layer0.weight",
        "layer1.bias",
        "layer1.weight",
    ]


def uneven_structures(rank: int, world: int, run: str) -> None:
    """FSDP on both ranks, and one buffer more on rank 0."""
    model, _ = build("fsdp", world, width=8)
    if rank == 0:
        model.register_buffer("only", torch.ones(3))
    ckpt.save(run, 1, {"model": model}, wait=True)


def test_a_mesh_across_layouts_is_saved_whole(tmp_path: Path) -> None:
    """Ranks of two structures hold shards of one tensor: both write theirs."""
    run_ranks(2, uneven_structures, str(tmp_path / "run"))
    assert ckpt.verify(tmp_path / "run").ok
    torch.manual_seed(0)
    expected = {"only": torch.ones(3), **Net(8).state_dict()}
    found = ckpt.read(tmp_path / "run")["model"]
    assert_equal(found, expected)


def refused_on_one_rank(rank: int, world: int, run: str) -> tuple[str, str]:
    """Rank 1's state has a value without a typed form."""
    try:
        ckpt.save(run, 1, {"x": ckpt.per_rank(print if rank == 1 else 3)})
    except ckpt.CkptError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_all_ranks_raise_when_one_refuses(tmp_path: Path) -> None:
    """The others name the rank and its cause, and nobody hangs."""
    other, own = run_ranks(2, refused_on_one_rank, str(tmp_path / "run"))
    assert own[0] == "UnsupportedValueError"
    assert other[0] == "RankError"
    assert other[1].startswith("rank 1: UnsupportedValueError")
