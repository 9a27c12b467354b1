"""Optimizers: state by parameter name, exactly what was saved, whatever the order, the groups and the flags."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from ckpt.errors import MismatchError, UnsupportedValueError
from ckpt.state import flatten, wanted
from tests.state.steps import assert_same, assert_same_optimizer, save


class Net(nn.Module):
    """p1 and p2 have the same shape on purpose."""

    def __init__(self, order=("p1", "p2"), seed=0):
        super().__init__()
        torch.manual_seed(seed)
        for name in order:
            setattr(self, name, nn.Linear(3, 3))

    def forward(self, x):
        return self.p2(self.p1(x).tanh())


def step_once(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(6.0).view(2, 3)).square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    return loss.item().hex()


MAKERS = {
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
    "LBFGS wolfe": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_optimizer_goes_on_as_if_never_stopped(kind):
    """State and settings are bit-equal after a load into a fresh optimizer, and so are the next three steps."""

    def make(seed):
        model = Net(seed=seed)
        return {"model": model, "optimizer": MAKERS[kind](model.parameters())}

    saved, target = make(0), make(5)
    for _ in range(3):
        step_once(**saved)
    step = save(saved)
    found = step.load(target)
    assert (found.missing, found.unexpected, found.mismatched) == ([], [], [])
    assert_same_optimizer(saved["optimizer"], target["optimizer"])
    assert [step_once(**target) for _ in range(3)] == [step_once(**saved) for _ in range(3)]
    # Into one that has state of its own: in place, tensor by tensor.
    kept = {id(v) for state in target["optimizer"].state.values() for v in state.values() if torch.is_tensor(v)}
    step.load(target)
    again = {id(v) for state in target["optimizer"].state.values() for v in state.values() if torch.is_tensor(v)}
    assert kept == again or kind.startswith("LBFGS")


def test_muon_and_sparse_adam():
    """The two that take only some parameters or gradients."""

    def muon(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 3, bias=False)
        return {"model": model, "optimizer": torch.optim.Muon(model.parameters())}

    def sparse(seed):
        torch.manual_seed(seed)
        model = nn.Embedding(5, 3, sparse=True)
        return {"model": model, "optimizer": torch.optim.SparseAdam(model.parameters())}

    for make, batch in ((muon, torch.ones(2, 3)), (sparse, torch.tensor([1, 3]))):
        saved, target = make(0), make(1)
        for state in (saved, target):
            state["model"](batch).square().sum().backward()
            state["optimizer"].step()
        save(saved).load(target)
        assert_same_optimizer(saved["optimizer"], target["optimizer"])


def test_names_on_disk():
    """Tensor names are the optimizer's path, the state's key and the parameter's full name."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step_once(model, optimizer)
    step = save({"model": model, "optimizer": optimizer})
    assert "optimizer.state.exp_avg.model.p1.weight" in step.stored
    assert step.view().values["optimizer"].groups[0]["params"] == [
        "model.p1.weight",
        "model.p1.bias",
        "model.p2.weight",
        "model.p2.bias",
    ]


def test_s08_moments_follow_names_not_positions():
    """Layers declared in another order still get their own moments."""
    a = Net()
    optimizer = torch.optim.Adam(a.parameters(), lr=0.1)
    for _ in range(2):
        step_once(a, optimizer)
    b = Net(order=("p2", "p1"), seed=3)
    other = torch.optim.Adam(b.parameters(), lr=0.5)
    save({"model": a, "optimizer": optimizer}).load({"model": b, "optimizer": other})
    for name, p in a.named_parameters():
        assert_same(other.state[dict(b.named_parameters())[name]], optimizer.state[p], name)
    assert step_once(a, optimizer) == step_once(b, other)


def groups_of(model, *, swapped):
    first = {"params": list(model.p1.parameters()), "lr": 0.1, "weight_decay": 0.5}
    second = {"params": list(model.p2.parameters()), "lr": 0.2, "betas": (0.5, 0.6)}
    return [second, first] if swapped else [first, second]


def test_s08_groups_may_be_swapped():
    """Settings go with the parameters that a group holds."""
    a, b = Net(), Net(seed=2)
    optimizer = torch.optim.AdamW(groups_of(a, swapped=False))
    step_once(a, optimizer)
    other = torch.optim.AdamW(groups_of(b, swapped=True))
    for group in other.param_groups:
        group["lr"] = 9.0
    dicts = list(other.param_groups)
    save({"model": a, "optimizer": optimizer}).load({"model": b, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]
    assert [group["betas"] for group in other.param_groups] == [(0.5, 0.6), (0.9, 0.999)]
    assert all(x is y for x, y in zip(dicts, other.param_groups, strict=True))
    assert step_once(a, optimizer) == step_once(b, other)


def test_a_group_that_is_split_keeps_each_parameters_settings():
    """One saved group, two now: both have its settings. Two saved with different ones, one now: a mismatch."""
    a, b = Net(), Net()
    one = torch.optim.AdamW(a.parameters(), lr=0.3)
    two = torch.optim.AdamW(groups_of(b, swapped=False))
    save({"model": a, "o": one}).load({"model": b, "o": two})
    assert [group["lr"] for group in two.param_groups] == [0.3, 0.3]
    two.param_groups[0]["lr"] = 0.9
    with pytest.raises(MismatchError, match=r"o\.param_groups\[0\]: parameters of the groups 0, 1"):
        wanted({"model": a, "o": one}, save({"model": b, "o": two}).view(), rank=0, world=1)


def test_s08_named_parameters_without_their_module():
    """Names given to the optimizer itself are enough; none at all is refused."""
    a, b = Net(), Net(order=("p2", "p1"))
    optimizer = torch.optim.Adam(a.named_parameters())
    step_once(a, optimizer)
    other = torch.optim.Adam(b.named_parameters())
    save({"optimizer": optimizer}).load({"optimizer": other})
    assert_same(other.state[b.p1.weight], optimizer.state[a.p1.weight])
    assert "param_names" in other.param_groups[0]
    nameless = {"optimizer": torch.optim.Adam(a.parameters())}
    with pytest.raises(UnsupportedValueError, match=r"parameter 0 of group 0, of shape \(3, 3\).*named_parameters"):
        flatten(nameless, rank=0, world=1)
    with pytest.raises(UnsupportedValueError, match="named_parameters"):
        wanted(nameless, save({"optimizer": optimizer}).view(), rank=0, world=1)


def test_bare_parameters_name_the_optimizers_state():
    """A parameter that is itself a leaf of the state has that leaf's name."""
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    w.sum().backward()
    optimizer.step()
    step = save({"w": w, "optimizer": optimizer})
    assert list(step.stored) == ["w", "optimizer.state.momentum_buffer.w"]
    v = nn.Parameter(torch.zeros(2))
    other = torch.optim.SGD([v], lr=0.1, momentum=0.9)
    step.load({"w": v, "optimizer": other})
    assert_same(other.state[v], optimizer.state[w])


def test_s07_frozen_and_partial_state():
    """Exactly the saved subset returns, whatever requires_grad and grad say."""

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(0)
    model[1].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(False)
    assert model[0].weight.grad is not None
    step = save({"model": model, "optimizer": optimizer})
    fresh, other = make(4)
    fresh[0].requires_grad_(False)
    fresh[1](torch.ones(1, 2)).sum().backward()
    other.step()  # has state for layer 1, which the step has not
    step.load({"model": fresh, "optimizer": other})
    assert set(other.state) == set(fresh[0].parameters())
    assert_same(other.state[fresh[0].weight], optimizer.state[model[0].weight])
    assert not fresh[0].weight.requires_grad
    for m, o in ((model, optimizer), (fresh, other)):
        m.requires_grad_(True)
        for _ in range(2):
            o.zero_grad()
            m(torch.ones(1, 2)).square().sum().backward()
            o.step()
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in fresh.parameters()])


def test_s07_an_optimizer_that_never_stepped():
    """No state is saved, and state that is there goes away."""
    a, b = Net(), Net()
    empty, full = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.parameters())
    step_once(b, full)
    save({"model": a, "optimizer": empty}).load({"model": b, "optimizer": full})
    assert not full.state


def test_strictness_counts_parameters():
    """A parameter that only one side optimizes is missing or unexpected."""
    a, b = Net(), Net()
    all_of, some = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.p1.parameters())
    step_once(a, all_of)
    found = save({"model": a, "o": all_of}).load({"model": b, "o": some}, strict=False)
    assert (found.missing, found.unexpected) == ([], ["o.params.model.p2.weight", "o.params.model.p2.bias"])
    assert_same(some.state[b.p1.bias], all_of.state[a.p1.bias])
    found = save({"model": b, "o": some}).load({"model": a, "o": all_of}, strict=False)
    assert (found.missing, found.unexpected) == (["o.params.model.p2.weight", "o.params.model.p2.bias"], [])


def test_a_parameter_that_does_not_fit_takes_no_moments():
    """Not strict: its state is left as it was."""
    a, b = nn.Linear(2, 2), nn.Linear(3, 2)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (a, b)]
    for m, o in zip((a, b), optimizers, strict=True):
        m(torch.ones(1, m.in_features)).sum().backward()
        o.step()
    before = optimizers[1].state[b.weight]["exp_avg"].clone()
    save({"model": a, "o": optimizers[0]}).load({"model": b, "o": optimizers[1]}, strict=False)
    assert_same(optimizers[1].state[b.weight]["exp_avg"], before)
    assert_same(optimizers[1].state[b.bias], optimizers[0].state[a.bias])


def test_a_tensor_learning_rate():
    """It is filled in place; a number that was saved replaces it, and the other way round."""
    a, b = Net(), Net()
    optimizer = torch.optim.Adam(a.parameters(), lr=torch.tensor(0.25))
    step = save({"model": a, "optimizer": optimizer})
    assert "optimizer.groups.0.lr" in step.stored
    lr = torch.tensor(0.5)
    other = torch.optim.Adam(b.parameters(), lr=lr)
    step.load({"model": b, "optimizer": other})
    assert other.param_groups[0]["lr"] is lr
    assert lr == 0.25
    number = torch.optim.Adam(b.parameters(), lr=0.125)
    step.load({"model": b, "optimizer": number})
    assert_same(number.param_groups[0]["lr"], torch.tensor(0.25))
    save({"model": a, "optimizer": torch.optim.Adam(a.parameters(), lr=0.75)}).load({"model": b, "optimizer": other})
    assert_same(other.param_groups[0]["lr"], 0.75)


def test_low_precision_parameters_keep_their_moments_precise():
    """Moments come back in their own dtype, not in the parameter's; with cast they follow it if they did before."""
    w = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    optimizer.state[w]["momentum_buffer"] = torch.tensor([1.0000001, 2.0])
    v = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    other = torch.optim.SGD([v], lr=0.1, momentum=0.9)
    save({"w": w, "o": optimizer}).load({"w": v, "o": other})
    assert_same(other.state[v], optimizer.state[w])

    x, y = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    single, double = torch.optim.Adam([x]), torch.optim.Adam([y])
    x.sum().backward()
    single.step()
    save({"w": x, "o": single}).load({"w": y, "o": double}, cast=True)
    assert {k: v.dtype for k, v in double.state[y].items()} == {
        "step": torch.float64,
        "exp_avg": torch.float64,
        "exp_avg_sq": torch.float64,
    }


def test_state_that_belongs_to_no_parameter():
    """Optimizers may keep state under keys of their own, nested and with tensors."""
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    optimizer.state["k"] = {"n": 1, "t": [torch.arange(2)]}
    optimizer.state[w]["deep"] = {"list": [torch.zeros(1), 5], "none": None}
    v = nn.Parameter(torch.zeros(2))
    other = torch.optim.SGD([v], lr=0.1)
    step = save({"w": w, "o": optimizer})
    step.load({"w": v, "o": other})
    assert_same(other.state["k"], optimizer.state["k"])
    assert_same(other.state[v], optimizer.state[w])
    assert_same(step.read()["o"]["state"], {"w": optimizer.state[w], "k": optimizer.state["k"]})


def test_read_gives_state_by_name():
    """A read has the shape of an optimizer's state_dict, with names for positions."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step_once(model, optimizer)
    read = save({"model": model, "optimizer": optimizer}).read()["optimizer"]
    assert list(read) == ["state", "param_groups"]
    assert_same(read["state"]["model.p1.weight"], optimizer.state[model.p1.weight])
    assert read["param_groups"][0]["params"] == list(read["state"])
    assert read["param_groups"][0]["betas"] == (0.9, 0.999)


def test_hidden_state_is_refused():
    """An optimizer whose state_dict has more than state and param_groups would lose it."""

    class More(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "more": 1}

    class Same(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict()

    w = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedValueError, match=r"o: .*More has state beyond .*\(more\)"):
        flatten({"w": w, "o": More([w], lr=1)}, rank=0, world=1)
    flatten({"w": w, "o": Same([w], lr=1)}, rank=0, world=1)


def test_post_hooks_run_after_a_load():
    """As after load_state_dict()."""
    w = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([w], lr=0.5)
    seen = []
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    save({"w": w, "o": torch.optim.SGD([w], lr=0.25)}).load({"w": w, "o": optimizer})
    assert seen == [0.25]


def schedulers():
    lr = torch.optim.lr_scheduler
    return {
        "MultiStep": lambda o: lr.MultiStepLR(o, [4]),
        "Cosine": lambda o: lr.CosineAnnealingLR(o, 20),
        "Lambda": lambda o: lr.LambdaLR(o, lambda n: 0.9**n),
        "Sequential": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.1, 5), lr.ExponentialLR(o, 0.9)], [5]),
        "OneCycle": lambda o: lr.OneCycleLR(o, 2.0, total_steps=21),
        "Step": lambda o: lr.StepLR(o, 3),
        "Linear": lambda o: lr.LinearLR(o, total_iters=7),
        "Polynomial": lambda o: lr.PolynomialLR(o, 10),
        "WarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4, 2),
        "Cyclic": lambda o: lr.CyclicLR(o, 0.1, 1.0, 3),
        "Chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 5), lr.ExponentialLR(o, 0.9)]),
        "Multiplicative": lambda o: lr.MultiplicativeLR(o, lambda n: 0.95),
        "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    }


@pytest.mark.parametrize("kind", schedulers())
@pytest.mark.filterwarnings("ignore")
def test_s27_schedulers_resume_at_every_step(kind):
    """The learning rates after a resume at k are those of the uninterrupted run, for every k."""

    def make():
        w = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9)
        return {"w": w, "optimizer": optimizer, "scheduler": schedulers()[kind](optimizer)}

    def advance(state):
        state["optimizer"].step()
        state["scheduler"].step()
        return state["optimizer"].param_groups[0]["lr"]

    whole, steps, rates = make(), [], []
    for _ in range(20):
        steps.append(save(whole))
        rates.append(advance(whole))
    for k in range(1, 20):
        resumed = make()
        steps[k].load(resumed)
        assert [advance(resumed) for _ in range(20 - k)] == rates[k:], k


def test_s27_plateau_and_grad_scaler():
    """A scheduler that watches the loss, and the loss scale with its growth counter."""

    def make():
        w = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([w], lr=1.0)
        return {
            "w": w,
            "optimizer": optimizer,
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2**16, growth_interval=3),
        }

    def advance(state, i):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            w, scaler = state["w"], state["scaler"]
            state["optimizer"].zero_grad()
            scaler.scale(w.sum() * (float("inf") if i == 2 else 1.0)).backward()
            scaler.step(state["optimizer"])
            scaler.update()
            state["plateau"].step(1.0)
        return scaler.get_scale(), scaler._growth_tracker.item(), state["optimizer"].param_groups[0]["lr"]

    whole, steps, found = make(), [], []
    for i in range(12):
        steps.append(save(whole))
        found.append(advance(whole, i))
    assert len({scale for scale, _, _ in found}) > 2
    for k in range(1, 12):
        resumed = make()
        steps[k].load(resumed)
        assert [advance(resumed, i) for i in range(k, 12)] == found[k:], k
