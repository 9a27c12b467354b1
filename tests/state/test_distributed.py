"""Sharded states on real ranks (gloo): DTensor in every placement, FSDP2, HSDP, tensor parallelism, DDP."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt.errors import MismatchError, UnsupportedValueError
from ckpt.state import flatten, wanted
from tests.ranks import run_ranks
from tests.state.steps import Step, assert_same, assert_same_optimizer, part_of


def gathered(state, rank, world):
    """The step that all ranks save together, on each of them."""
    parts = [None] * world
    dist.all_gather_object(parts, part_of(state, rank, world))
    return Step(*parts)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- DTensors -------------------------------------------------------------------------------


def layouts():
    """(mesh, placements) of every kind that four ranks allow."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Shard(0), Shard(0)]),
        (grid, [Shard(1), Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (grid["tp"], [Shard(0)]),
    ]


def placements_main(rank, world):
    for shape in [(7, 5), (1, 3), (0, 3), (6, 2)]:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
        steps = {}
        for i, (mesh, placements) in enumerate(layouts()):
            if mesh.ndim == 1 and mesh.size() == 2:
                continue  # a mesh of some of the ranks: as a target only
            state = {"w": distribute_tensor(whole, mesh, placements), "n": 1}
            steps[i] = gathered(state, rank, world)
            assert torch.equal(steps[i].whole[None, "w"], whole), (shape, mesh, placements)
        for step in steps.values():
            for mesh, placements in layouts():
                target = {"w": distribute_tensor(torch.zeros(shape), mesh, placements), "n": 0}
                there = target["w"]
                step.load(target, rank, world)
                assert target["w"] is there
                assert torch.equal(there.full_tensor(), whole)
            target = {"w": torch.zeros(shape), "n": 0}
            step.load(target, rank, world)
            assert torch.equal(target["w"], whole)
            # Shapes are compared as a whole, not by what lies here.
            wrong = {"w": distribute_tensor(torch.zeros(shape[1], shape[0] + 1), layouts()[0][0], [Shard(1)]), "n": 0}
            found = step.load(wrong, rank, world, strict=False)
            assert [m.name for m in found.mismatched] == ["w"]
            # No template: whole, on the CPU.
            assert torch.equal(step.read()["w"], whole)
    line = layouts()[0][0]
    partial = DTensor.from_local(torch.ones(2), line, [Partial()], run_check=False)
    with pytest.raises(UnsupportedValueError, match=r"deep\.w: a DTensor with placement .*Partial|P\("):
        flatten({"deep": {"w": partial}}, rank=rank, world=world)
    # Torch may keep the order in which shards nest beside the placements: here dimension "tp" cuts first.
    grid, meta = layouts()[4][0], TensorMeta(torch.Size((8, 2)), (2, 1), torch.float32)
    spec = DTensorSpec(grid, (Shard(0), Shard(0)), meta, shard_order=(ShardOrderEntry(0, (1, 0)),))
    reordered = DTensor(torch.zeros(2, 2), spec, requires_grad=False)
    assert flatten({"w": reordered}, rank=rank, world=world).tensors[0].what.placements == ("S0/2", "S0")
    split = DTensor(
        torch.zeros(2, 2), DTensorSpec(grid, (Replicate(), _StridedShard(0, split_factor=2)), meta), requires_grad=False
    )
    with pytest.raises(UnsupportedValueError, match=r"w: placements .* not one block"):
        flatten({"w": split}, rank=rank, world=world)
    crooked = DTensor.from_local(
        torch.ones(rank + 1, 2), line, [Shard(0)], run_check=False, shape=torch.Size((10, 2)), stride=(2, 1)
    )
    if rank != 2:  # whose three rows are what the arithmetic gives it
        with pytest.raises(UnsupportedValueError, match=rf"w: rank {rank} holds a shard of shape \({rank + 1}, 2\)"):
            flatten({"w": crooked}, rank=rank, world=world)
    with pytest.raises(UnsupportedValueError, match=r"w: a DTensor cannot be per_rank"):
        from ckpt import per_rank

        flatten({"w": per_rank(distribute_tensor(torch.ones(4), line, [Shard(0)]))}, rank=rank, world=world)


def test_s04_every_placement_into_every_other():
    """Uneven, empty and replicated shards on lines, grids and a part of the ranks; sums and crooked shards refused."""
    run_ranks(4, placements_main)


# -- FSDP2, HSDP, tensor parallelism ----------------------------------------------------------


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(7, 10)  # cut in two by tensor parallelism, then unevenly by FSDP
        self.down = nn.Linear(10, 3, bias=False)  # three rows over four ranks
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.scale


def sharded(form, seed=0, make_optimizer=None, device=None):
    """Net in one of the forms that the world size allows, and its optimizer."""
    world = dist.get_world_size()
    with torch.device(device or "cpu"):
        model = Net(seed)
    if form == "fsdp":
        fully_shard(model.up)
        fully_shard(model)
    elif form == "fsdp_no_reshard":
        fully_shard(model, reshard_after_forward=False)
    elif form == "fsdp_bf16":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif form == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif form in {"tp", "fsdp+tp"}:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if form == "fsdp+tp":
            fully_shard(model, mesh=mesh["dp"])
    elif form == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    make = make_optimizer or (lambda p: torch.optim.AdamW(p, lr=0.1))
    return {"model": model, "optimizer": make(model.parameters()), "epoch": seed}


def train(state, count):
    for i in range(count):
        state["optimizer"].zero_grad()
        state["model"](torch.full((2, 7), float(i + 1)) / 3).square().mean().backward()
        state["optimizer"].step()


def whole_model(model):
    return {name.removeprefix("module."): full(t.detach()) for name, t in model.state_dict().items()}


def whole_optimizer(optimizer):
    return [
        {key: full(value) if torch.is_tensor(value) else value for key, value in optimizer.state[p].items()}
        for p in optimizer.param_groups[0]["params"]
    ]


FORMS = ["fsdp", "fsdp_no_reshard", "fsdp_bf16", "hsdp", "tp", "fsdp+tp", "ddp", "plain"]
MODEL_NAMES = ["model.scale", "model.up.weight", "model.up.bias", "model.down.weight"]


def forms_main(rank, world):
    steps = {}
    for form in FORMS:
        state = sharded(form)
        train(state, 2)
        if form == "fsdp_no_reshard":  # whole parameters lie in the module after a forward
            state["model"](torch.ones(2, 7))
        step = steps[form] = gathered(state, rank, world)
        assert sorted(n for n in step.stored if n.startswith("model.")) == sorted(MODEL_NAMES)
        for name, tensor in whole_model(state["model"]).items():
            assert_same(step.whole[None, f"model.{name}"], tensor, f"{form} {name}")
    for form, step in steps.items():
        for other in FORMS if form in {"fsdp", "fsdp+tp"} else ("fsdp", "plain"):
            target = sharded(other, seed=4)
            step.load(target, rank, world)
            assert target["epoch"] == 0
            for name, tensor in whole_model(target["model"]).items():
                assert_same(tensor, step.whole[None, f"model.{name}"], f"{form} to {other}: {name}")
            names = [f"model.{n.removeprefix('module.')}" for n, _ in target["model"].named_parameters()]
            for name, values in zip(names, whole_optimizer(target["optimizer"]), strict=True):
                for key, value in values.items():
                    where = f"{form} to {other}: {key} {name}"
                    assert_same(value, step.whole[None, f"optimizer.state.{key}.{name}"], where)
            train(target, 1)  # what was allocated fits the parameters


def test_s11_forms_into_others():
    """FSDP2 (plain, kept unsharded, bf16), HSDP, TP, FSDP2 x TP, DDP and plain, with AdamW; and training goes on."""
    run_ranks(4, forms_main)


class Factored(torch.optim.Optimizer):
    """Keeps a column beside each matrix, as Adafactor does (torch 2.13 itself cannot step that on DTensors)."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["column"] = p.new_zeros((*p.shape[:-1], 1))
            state["step"] += 1
            state["column"] += 1.5
            p.sub_(state["column"] * p.grad, alpha=0.1)


def optimizers_main(rank, world):
    makers = {
        "Factored": Factored,
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
        "ASGD": lambda p: torch.optim.ASGD(p, foreach=False),
        "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    }
    for kind, make in makers.items():
        for form, other in (("plain", "fsdp"), ("fsdp", "plain"), ("fsdp", "fsdp")):
            state = sharded(form, make_optimizer=make)
            train(state, 2)
            target = sharded(other, seed=3, make_optimizer=make)
            gathered(state, rank, world).load(target, rank, world)
            found, expected = whole_optimizer(target["optimizer"]), whole_optimizer(state["optimizer"])
            assert_same(found, expected, f"{kind} {form} to {other}")
            if form == other:
                assert_same_optimizer(target["optimizer"], state["optimizer"])
            # What a fresh optimizer would have allocated has the kind that was allocated here.
            reference = sharded(other, seed=3, make_optimizer=make)
            train(reference, 1)
            for p, q in zip(target["model"].parameters(), reference["model"].parameters(), strict=True):
                for key, value in reference["optimizer"].state[q].items():
                    mine = target["optimizer"].state[p][key]
                    assert isinstance(mine, DTensor) == isinstance(value, DTensor), (kind, form, other, key)
            train(target, 1)


def test_optimizers_across_placements():
    """State of another shape than the parameter's (Adafactor) and plain counters are placed as torch would."""
    run_ranks(2, optimizers_main)


def meta_main(rank, world):
    saved = sharded("fsdp")
    train(saved, 2)
    step = gathered(saved, rank, world)
    target = sharded("fsdp", device="meta")
    parameters = list(target["model"].parameters())
    step.load(target, rank, world)
    assert all(p is q for p, q in zip(parameters, target["model"].parameters(), strict=True))
    assert_same_optimizer(target["optimizer"], saved["optimizer"])
    for state in (target, saved):
        train(state, 2)
    assert_same(whole_model(target["model"]), whole_model(saved["model"]))


def test_s01_a_meta_fsdp_model_is_made_real():
    """Uneven shards get memory on the mesh's device, FSDP learns of it, and training goes on alike."""
    run_ranks(4, meta_main)


# -- world sizes ------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.emb(ids))


def tied_state(world):
    model = Tied()
    if world > 1:
        fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def save_main(rank, world, path, kind):
    if kind == "tied":
        state = tied_state(world)
        state["model"](torch.arange(11)).square().mean().backward()
        state["optimizer"].step()
    else:
        state = sharded(kind)
        train(state, 3)
    step = gathered(state, rank, world)
    if rank == 0:
        path.write_bytes(pickle.dumps(step.parts))


def load_main(rank, world, path, kind):
    step = Step(*pickle.loads(path.read_bytes()))
    if kind == "tied":
        target = tied_state(world)
        with torch.no_grad():
            for p in target["model"].parameters():
                p.zero_()
        step.load(target, rank, world)
        assert target["model"].head.weight is target["model"].emb.weight
        assert_same(full(target["model"].emb.weight.detach()), step.whole[None, "model.emb.weight"])
        moment = target["optimizer"].state[target["model"].emb.weight]["exp_avg"]
        assert_same(full(moment), step.whole[None, "optimizer.state.exp_avg.model.emb.weight"])
        return
    target = sharded(kind, seed=8)
    step.load(target, rank, world)
    again = gathered(target, rank, world)
    assert again.stored == step.stored
    for name in step.stored:
        assert_same(again.whole[None, name], step.whole[None, name], name)
    return


def test_s11_world_sizes(tmp_path):
    """Saved by four ranks, loaded by one and by three (where other shards are uneven)."""
    path = tmp_path / "step"
    run_ranks(4, save_main, path, "fsdp")
    for world in (1, 3):
        run_ranks(world, load_main, path, "fsdp")


def test_s01_tied_weights_across_world_sizes(tmp_path):
    """One copy, from one rank to two and back; the tie holds under FSDP2."""
    for world, other in ((1, 2), (2, 1)):
        path = tmp_path / f"step{world}"
        run_ranks(world, save_main, path, "tied")
        step = Step(*pickle.loads(path.read_bytes()))
        assert [name for name in step.stored if name.startswith("model.")] == ["model.emb.weight"]
        assert step.aliases["model.head.weight"] == "model.emb.weight"
        run_ranks(other, load_main, path, "tied")


# -- what differs between ranks ---------------------------------------------------------------


def stages_main(rank, world):
    """Pipeline stages: each finds the other's tensors unexpected; what is so on all ranks is."""
    saved = {"model": nn.ModuleDict({str(rank): nn.Linear(2, 2)})}
    parts = [None] * world
    dist.all_gather_object(parts, part_of(saved, rank, world))
    step = Step(*parts)
    target = {"model": nn.ModuleDict({str(rank): nn.Linear(2, 2)})}
    with pytest.raises(MismatchError):
        wanted(target, step.view(rank, world), rank=rank, world=world)
    found = wanted(target, step.view(rank, world), rank=rank, world=world, strict=False)
    everyone = [None] * world
    dist.all_gather_object(everyone, found.unexpected)
    found.unexpected[:] = [name for name in found.unexpected if all(name in other for other in everyone)]
    found.refuse_misfits()
    step.carry_out(found.reads)
    found.apply()
    assert_same(target["model"][str(rank)].weight.detach(), saved["model"][str(rank)].weight.detach())


def test_stages_of_a_pipeline():
    """What the engine has to do for ranks that hold different modules is possible with a target."""
    run_ranks(2, stages_main)
