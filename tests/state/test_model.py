"""Modules: names without wrappers, ties, meta devices, and what a class says of its own state."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt.errors import BadInputError, MismatchError, UnsupportedValueError
from ckpt.state import flatten, wanted
from tests.state.steps import assert_same, assert_same_optimizer, save

NAMES = ["model.0.weight", "model.0.bias", "model.1.0.weight", "model.1.0.bias"]


def plain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))


def inner(module):
    """The bare module behind any of the forms."""
    while hasattr(module, "module") or hasattr(module, "_orig_mod"):
        module = module.module if hasattr(module, "module") else module._orig_mod
    return module


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    path = tmp_path_factory.mktemp("gloo") / "rendezvous"
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compiled(module):
    return torch.compile(module, backend="eager")


def checkpointed(module):
    module[1] = checkpoint_wrapper(module[1])
    return module


def checkpointed_compiled(module):
    module[1] = checkpoint_wrapper(compiled(module[1]))
    return module


FORMS = {
    "plain": lambda module: module,
    "compile": compiled,
    "ddp": nn.parallel.DistributedDataParallel,
    "checkpoint": checkpointed,
    "checkpoint(compile)": checkpointed_compiled,
    "ddp(compile)": lambda module: nn.parallel.DistributedDataParallel(compiled(module)),
    "data_parallel(checkpoint)": lambda module: nn.DataParallel(checkpointed(module)),
}


def trained(form, seed=0, steps=2):
    model = FORMS[form](plain(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(i + 1))).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.filterwarnings("ignore")
def test_s09_any_wrapping_loads_into_any_other(gloo):
    """Names on disk are the bare module's; every form loads into every other, optimizer too."""
    saved = {form: trained(form) for form in FORMS}
    steps = {form: save(state) for form, state in saved.items()}
    bare = trained("plain")
    for form, step in steps.items():
        assert [name for name in step.stored if name.startswith("model.")] == NAMES, form
        state_names = [n for n in step.stored if n.startswith("optimizer.state.")]
        assert state_names == [f"optimizer.state.{k}.{n}" for n in NAMES for k in ("step", "exp_avg", "exp_avg_sq")]
    for form, other in itertools.product(FORMS, FORMS):
        target = trained(other, seed=5, steps=0)
        steps[form].load(target)
        for p, q in zip(bare["model"].parameters(), target["model"].parameters(), strict=True):
            assert_same(p.detach(), q.detach(), f"{form} to {other}")
        assert_same_optimizer(bare["optimizer"], target["optimizer"])


def test_s09_an_attribute_called_module_is_kept():
    """Wrappers are known by their type, not by the name of an attribute."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)
            self._orig_mod = nn.Linear(1, 1)

    names = [leaf.name for leaf in flatten({"model": Holder()}, rank=0, world=1).tensors]
    assert names == ["model.module.weight", "model.module.bias", "model._orig_mod.weight", "model._orig_mod.bias"]


def test_an_averaged_model_keeps_its_own_names():
    """AveragedModel is a module with a module and a counter, not a wrapper."""
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    averaged.update_parameters(nn.Linear(1, 1))
    names = [leaf.name for leaf in flatten({"ema": averaged}, rank=0, world=1).tensors]
    assert names == ["ema.n_averaged", "ema.module.weight", "ema.module.bias"]
    target = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    save({"ema": averaged}).load({"ema": target})
    assert target.n_averaged == 1


def test_ddp_says_what_is_a_replica(gloo):
    """DDP's parameters are trusted, their moments too; its buffers are rank 0's; what it ignores is neither."""
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias"])
    ddp = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), momentum=0.9)
    ddp(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    leaves = {
        leaf.name: (leaf.trusted_replica, leaf.what.first_rank_owns)
        for leaf in flatten({"model": ddp, "optimizer": optimizer}, rank=0, world=1).tensors
    }
    assert leaves["model.0.weight"] == (True, False)
    assert leaves["model.0.bias"] == (False, False)
    assert leaves["model.1.running_mean"] == (False, True)
    assert leaves["optimizer.state.momentum_buffer.model.0.weight"] == (True, False)
    assert leaves["optimizer.state.momentum_buffer.model.0.bias"] == (False, False)
    partial = flatten({"model": ddp}, rank=0, world=2).tensors  # DDP over some of the ranks promises nothing
    assert not any(leaf.trusted_replica or leaf.what.first_rank_owns for leaf in partial)


class Tied(nn.Module):
    def __init__(self, tied=True, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.emb(ids))


def tied_state(*, tied=True, seed=0, steps=0):
    model = Tied(tied, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step_once(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def step_once(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.arange(11)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item().hex()


def test_s01_tied_weights_are_stored_once():
    """One copy, both names resolve, in the module and in the optimizer."""
    step = save(tied_state(steps=3))
    assert [name for name in step.stored if name.startswith("model.")] == ["model.emb.weight"]
    assert sum(step.whole[None, n].numel() * 4 for n in step.stored if n.startswith("model.")) == 264
    assert step.aliases == {
        "model.head.weight": "model.emb.weight",
        **{
            f"optimizer.state.{key}.model.head.weight": f"optimizer.state.{key}.model.emb.weight"
            for key in ("step", "exp_avg", "exp_avg_sq")
        },
    }
    read = step.read()["model"]
    assert read["head.weight"] is read["emb.weight"]


def test_s01_tied_weights_load_into_a_tied_model():
    """The tie survives, and the next step is that of the uninterrupted run."""
    saved, target = tied_state(steps=3), tied_state(seed=7)
    save(saved).load(target)
    assert target["model"].head.weight is target["model"].emb.weight
    assert_same_optimizer(saved["optimizer"], target["optimizer"])
    assert step_once(**target) == step_once(**saved)


def test_s01_tied_weights_load_into_an_untied_model():
    """Both are filled, and both get the moments."""
    saved, target = tied_state(steps=3), tied_state(tied=False, seed=7)
    save(saved).load(target)
    model, optimizer = target["model"], target["optimizer"]
    for p in (model.head.weight, model.emb.weight):
        assert_same(p.detach(), saved["model"].emb.weight.detach())
        assert_same(optimizer.state[p], saved["optimizer"].state[saved["model"].emb.weight])
    assert model.head.weight is not model.emb.weight
    assert optimizer.state[model.head.weight]["exp_avg"] is not optimizer.state[model.emb.weight]["exp_avg"]


def test_s01_untied_weights_do_not_vanish_in_a_tied_model():
    """Two stored tensors and one place: a mismatch; not strict, the first name wins."""
    saved, target = tied_state(tied=False, steps=1), tied_state(seed=7)
    with pytest.raises(
        MismatchError, match=r"model\.head\.weight: a tensor of its own in the step, tied to model\.emb"
    ):
        wanted(target, save(saved).view(), rank=0, world=1)
    save(saved).load(target, strict=False)
    assert_same(target["model"].head.weight.detach(), saved["model"].emb.weight.detach())


def test_s01_ties_of_memory_and_of_buffers():
    """Two Parameter objects of one memory are one tensor; so is a buffer that many modules share."""
    model = Tied(tied=False)
    model.head.weight = nn.Parameter(model.emb.weight.data)
    table = torch.arange(3.0)
    model.emb.register_buffer("table", table)
    model.head.register_buffer("table", table)
    step = save({"model": model})
    assert list(step.stored) == ["model.emb.weight", "model.emb.table"]
    assert step.aliases == {"model.head.weight": "model.emb.weight", "model.head.table": "model.emb.table"}
    half = Tied(tied=False)
    half.head.weight = nn.Parameter(half.emb.weight.data[:11, :6].t().contiguous().t())  # equal, but another memory
    assert list(save({"model": half}).stored) == ["model.emb.weight", "model.head.weight"]


def test_s01_a_meta_model_is_made_real():
    """Parameters stay the objects that optimizers and ties know; buffers and attributes come along."""
    saved = tied_state(steps=3)
    saved["model"].register_buffer("table", torch.arange(3.0))
    with torch.device("meta"):
        target = tied_state()
        target["model"].register_buffer("table", torch.arange(3.0))
    weight, buffer = target["model"].emb.weight, target["model"].table
    weight.marked = "yes"
    save(saved).load(target)
    assert target["model"].head.weight is target["model"].emb.weight is weight
    assert target["model"].table is buffer
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.marked == "yes"
    assert (weight.device.type, buffer.device.type) == ("cpu", "cpu")
    assert_same_optimizer(saved["optimizer"], target["optimizer"])
    assert step_once(**target) == step_once(**saved)


def test_s01_a_meta_model_tied_by_memory():
    """Two meta Parameters of one memory share the new memory too."""
    with torch.device("meta"):
        target = Tied(tied=False)
        target.head.weight = nn.Parameter(target.emb.weight.data)
    save({"model": Tied()}).load({"model": target})
    assert target.head.weight is not target.emb.weight
    with torch.no_grad():
        target.head.weight.fill_(3)
    assert target.emb.weight.eq(3).all()


def test_a_meta_parameter_that_cannot_be_replaced():
    """A weak reference pins the object: the message says what to do."""
    import weakref

    with torch.device("meta"):
        target = nn.Linear(1, 1)
    reference = weakref.ref(target.weight)
    with pytest.raises(BadInputError, match=r"model\.weight: .*to_empty"):
        save({"model": nn.Linear(1, 1)}).load({"model": target})
    assert reference() is target.weight


def test_an_expanded_buffer_is_replaced():
    """It has one element in memory and five to fill."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.tensor([1.0]).expand(5))

    target = Wide()
    stored = Wide()
    stored.b = torch.arange(5.0)
    save({"m": stored}).load({"m": target})
    assert target.b.tolist() == [0, 1, 2, 3, 4]


def test_buffers_that_are_not_persistent_are_no_state():
    """As in state_dict()."""
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("cache", torch.ones(1), persistent=False)
    module.register_parameter("none", None)
    assert list(save({"m": module}).stored) == ["m.kept"]


class WithExtra(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [5, {"a": [1, (2, "x")], "t": torch.arange(3)}, torch.ones(2), None])
def test_extra_state(extra):
    """get_extra_state comes back through set_extra_state: plain values, trees with tensors, a tensor."""
    saved = nn.Sequential(nn.Linear(1, 1), WithExtra(extra))
    target = nn.Sequential(nn.Linear(1, 1), WithExtra("before"))
    step = save({"model": saved})
    step.load({"model": target})
    assert_same(target[1].extra, extra)
    assert_same(step.read()["model"]["1._extra_state"], extra)
    assert list(step.read()["model"]) == ["0.weight", "0.bias", "1.w", "1._extra_state"]


def test_extra_state_counts_for_strictness():
    """One that only one side has is missing or unexpected."""
    other = nn.Module()
    other.w = nn.Parameter(torch.zeros(1))
    found = save({"m": WithExtra(1)}).load({"m": other}, strict=False)
    assert (found.missing, found.unexpected) == ([], ["m._extra_state"])
    found = save({"m": other}).load({"m": WithExtra(1)}, strict=False)
    assert (found.missing, found.unexpected) == (["m._extra_state"], [])


class Packed(nn.Module):
    """Keeps two numbers packed, and says so in its own words, as quantized modules do."""

    def __init__(self, a, b):
        super().__init__()
        self.packed = (a, b)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "a"] = torch.tensor(self.packed[0])
        destination[prefix + "label"] = self.packed[1]

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.packed = (int(state_dict[prefix + "a"]), state_dict[prefix + "label"])


def test_a_class_that_computes_its_state():
    """``_save_to_state_dict`` and ``_load_from_state_dict`` are honoured, tensors or not."""
    target = nn.Sequential(nn.Sequential(Packed(0, "")))
    step = save({"model": nn.Sequential(nn.Sequential(Packed(7, "x")))})
    step.load({"model": target})
    assert target[0][0].packed == (7, "x")
    assert_same(step.read()["model"], {"0.0.a": torch.tensor(7), "0.0.label": "x"})


class Opaque(nn.Module):
    """Overrides ``state_dict`` itself, as torchmetrics does, and has wrapped modules inside."""

    def __init__(self, total):
        super().__init__()
        self.total = torch.tensor(float(total))
        self.net = checkpoint_wrapper(nn.Sequential(compiled(nn.Linear(1, 1))))

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        found = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        found[prefix + "total"] = self.total if keep_vars else self.total.detach()
        return found

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if prefix + "total" in state_dict:
            self.total = state_dict[prefix + "total"]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_class_with_a_state_dict_of_its_own():
    """What it adds comes back, and its parameters are filled in place."""
    saved, target = nn.Sequential(Opaque(5)), nn.Sequential(Opaque(0))
    weight = target[0].net._checkpoint_wrapped_module[0]._orig_mod.weight
    step = save({"model": saved})
    assert list(step.stored) == ["model.0.net.0.weight", "model.0.net.0.bias", "model.0.total"]
    step.load({"model": target})
    assert target[0].total == 5
    assert_same(weight.detach(), saved[0].net._checkpoint_wrapped_module[0]._orig_mod.weight.detach())


def test_hooks():
    """Pre-hooks run, post-hooks may drop and rename, and hooks after a load run once it is loaded."""
    calls = []

    def make():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].register_state_dict_pre_hook(lambda m, prefix, keep: calls.append(("pre", prefix)))

        def drop(m, state_dict, prefix, metadata):
            state_dict.pop(prefix + "0.bias")
            state_dict[prefix + "renamed"] = state_dict.pop(prefix + "1.bias")

        module.register_state_dict_post_hook(drop)
        module[1].register_load_state_dict_post_hook(lambda m, keys: calls.append(("post", m.bias.sum().item())))
        return module

    saved, target = make(), make()
    with torch.no_grad():
        saved[1].bias.fill_(4)
    step = save({"model": saved})
    assert set(step.stored) == {"model.0.weight", "model.1.weight", "model.renamed"}
    bias = target[0].bias.clone()
    step.load({"model": target})
    assert target[1].bias.tolist() == [4, 4]
    assert torch.equal(target[0].bias, bias)
    assert calls == [("pre", "0."), ("pre", "0."), ("post", 8.0)]


def test_s10_modules_are_strict():
    """Missing, unexpected and mismatched parameters are listed, and nothing is touched."""
    saved = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    target = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(1, 1))
    target[1].bias = None
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(MismatchError) as caught:
        wanted({"model": target}, save({"model": saved}).view(), rank=0, world=1)
    for line in (
        "model.2.weight",
        "model.2.bias",
        "model.1.bias",
        "model.0.weight: float32 (4, 3) in the step, float32 (4, 2) in the state",
    ):
        assert f"    {line}\n" in str(caught.value)
    assert_same(dict(target.state_dict()), dict(before))


def test_odd_names():
    """Characters that mean something in names are escaped, and come back."""
    module = nn.ModuleDict({"a[0]": nn.Linear(1, 1, bias=False), "b%c": nn.Linear(1, 1, bias=False)})
    step = save({"model.x": module})
    assert list(step.stored) == ["model%2Ex.a%5B0].weight", "model%2Ex.b%25c.weight"]
    assert list(step.read()["model.x"]) == ["a[0].weight", "b%c.weight"]
    step.load({"model.x": module})


def test_groups():
    """Only a module called model and an optimizer called optimizer get files of their own."""
    linear = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(linear.parameters(), momentum=0.9)
    linear(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    state = {"model": linear, "optimizer": optimizer, "ema": nn.Linear(1, 1), "w": torch.ones(1)}
    groups = {leaf.name.partition(".")[0]: leaf.group for leaf in flatten(state, rank=0, world=1).tensors}
    assert groups == {"model": "model", "optimizer": "optimizer", "ema": "state", "w": "state"}
    assert flatten({"model": {"w": torch.ones(1)}}, rank=0, world=1).tensors[0].group == "state"


def test_lazy_modules_are_refused_until_they_are_real():
    """A parameter without a shape has no values."""
    with pytest.raises(UnsupportedValueError, match=r"model\.weight: not initialized"):
        flatten({"model": nn.LazyLinear(1)}, rank=0, world=1)


def test_modules_in_lists_and_dicts():
    """Anywhere in the state; a longer list is missing its last module."""
    saved = {"nets": [nn.Linear(1, 1), nn.Linear(1, 1)], "d": {"x": nn.Linear(1, 1)}}
    target = {"nets": [nn.Linear(1, 1), nn.Linear(1, 1)], "d": {"x": nn.Linear(1, 1)}}
    save(saved).load(target)
    assert_same(target["nets"][1].weight.detach(), saved["nets"][1].weight.detach())
    found = save(saved).load({"nets": [nn.Linear(1, 1)], "d": {"y": nn.Linear(1, 1)}}, strict=False)
    assert (found.missing, found.unexpected) == (["d.y"], ["nets.1", "d.x"])
    found = save(saved).load({"nets": [*target["nets"], nn.Linear(1, 1)]}, strict=False)
    assert found.missing == ["nets.2"]


@pytest.mark.filterwarnings("ignore")
def test_scripted_modules():
    """Compiled to TorchScript, a module has the same names, and loads into the plain one."""
    saved = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    target = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    save({"model": saved}).load({"model": target})
    assert_same(target[0].weight.detach(), saved[0].weight.detach())
    again = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    save({"model": target}).load({"model": again})
    assert_same(again[0].weight.detach(), saved[0].weight.detach())
