"""Wrong-state alarms on real ranks: what is said, what is kept in the step, and what ``alarms="raise"`` refuses."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.format.alarms import NOT_FINITE, RANDOM, REPLICAS, UNCHANGED, Alarm
from ckpt.reading.alarms import step_alarms
from ckpt.run import Run
from ckpt.snapshot.samples import PLACES, WINDOW_NBYTES
from tests.distributed.models import build, train
from tests.ranks import run_ranks


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """The lines about alarms on this process's standard error meanwhile."""
    lines: list[str] = []
    with contextlib.redirect_stderr(io.StringIO()) as text:
        yield lines
    lines += [line for line in text.getvalue().splitlines() if line.startswith("ckpt: alarm")]


def stored(run: str, step: int) -> tuple[Alarm, ...]:
    """What is in the step, and that it is a good one."""
    opened = Run.open(run)
    state = opened.find(step)
    assert state.commit is not None
    assert ckpt.verify(run, step=step).ok
    return step_alarms(opened, state.attempt, state.commit)


def names(alarms: tuple[Alarm, ...], kind: str) -> list[str]:
    """Of the tensors of one kind."""
    return [alarm.tensor for alarm in alarms if alarm.kind == kind]


def refused(run: str, step: int, state: dict[str, Any], **options: Any) -> str:
    """What a save is refused with."""
    with pytest.raises(ckpt.SaveFailedError) as caught:
        ckpt.save(run, step, state, alarms="raise", **options).result(60)
    return str(caught.value)


# ---------------------------------------------------------------- one rank


class Frozen(nn.Module):
    """The head is trained; the base never gets a gradient although it asks for one; the buffer asks for none."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head, self.off = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.off.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all, with the base cut off."""
        return self.off(self.head(self.base(x).detach())) * self.scale[0]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()


BASE = ["model.base.bias", "model.base.weight"]


@pytest.mark.parametrize("options", [{}, {"encode": "zstd"}, {"overlap": True}])
def test_what_does_not_train_is_said_once(tmp_path: Path, options: dict[str, Any]):
    """From the second save on: kept in each step, said once, and again when it is another list of tensors."""
    run = str(tmp_path / "run")
    model = Frozen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0)
    state = {"model": model, "optimizer": optimizer}

    def save(step: int, **more: Any) -> tuple[Alarm, ...]:
        trained(model, optimizer)
        pending = ckpt.save(run, step, state, **options, **more)
        found = pending.result(60).alarms
        assert found == pending.alarms == stored(run, step)
        return found

    with said() as lines:
        assert save(1) == ()
        assert save(2) == tuple(Alarm(UNCHANGED, name) for name in BASE)
        assert names(save(3), UNCHANGED) == BASE
        nn.init.normal_(model.base.weight)
        assert names(save(4), UNCHANGED) == BASE[:1]
        nn.init.normal_(model.base.weight)
        nn.init.normal_(model.base.bias)
        assert save(5) == ()
        assert names(save(6), UNCHANGED) == BASE
        assert save(7, alarms="off") == ()
    assert [re.sub(": not one byte.*", "", line) for line in lines] == [
        "ckpt: alarm, step 2: model.base.bias, model.base.weight",
        "ckpt: alarm, step 4: model.base.bias",
        "ckpt: alarm, step 6: model.base.bias, model.base.weight",
    ]
    commit = Run.open(run).find(7).commit
    assert commit is not None
    assert "alarms" not in commit.features
    assert "alarms.json" not in [file.name for file in commit.files]


def test_raise_keeps_a_poisoned_step_from_coming_to_be(tmp_path: Path):
    """The step before stays the latest; the next save is judged anew, also of the same step."""
    run = str(tmp_path / "run")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "seen": torch.tensor([1.0, float("nan")]).half()}
    message = refused(run, 1, state)
    assert 'alarms="raise": seen (1 NaN, rank 0): NaN or infinite' in message
    assert ckpt.latest(run) is None
    state["seen"] = torch.ones(2).half()
    ckpt.save(run, 1, state, alarms="raise").result(60)
    assert "model.bias, model.weight: the very bytes" in refused(run, 2, state)
    assert "model.bias, model.weight: the very bytes" in refused(run, 2, state)
    assert ckpt.steps(run) == [1]
    assert sorted(path.name for path in Path(run).glob("step-*")) == ["step-00000001-w1.2"]
    trained(model, optimizer)
    assert ckpt.save(run, 2, state, alarms="raise").result(60).alarms == ()
    with torch.no_grad():
        model.weight[1, 2] = float("-inf")
        model.bias += 1
    assert "model.weight (1 Inf, rank 0): NaN or infinite" in refused(run, 3, state)
    assert "model.weight (1 Inf, rank 0)" in refused(run, 4, state, on_error="warn")  # said, and got over
    ckpt.save(run, 5, state).result(60)
    assert ckpt.steps(run) == [1, 2, 5]
    assert names(stored(run, 5), NOT_FINITE) == ["model.weight"]


def test_an_unknown_mode_is_refused(tmp_path: Path):
    """Before anything is made."""
    with pytest.raises(ckpt.BadInputError, match=r"alarms='loud': expected one of warn, raise, off"):
        ckpt.save(tmp_path / "run", 1, {"w": torch.ones(2)}, alarms="loud")
    with pytest.raises(ckpt.BadInputError, match="alarms=None"):
        ckpt.Checkpointer(tmp_path / "run", {"w": torch.ones(2)}, alarms=None)  # type: ignore[arg-type]


def test_the_checkpointer_takes_it(tmp_path: Path):
    """As ckpt.save does; SaveReport has the alarms."""
    state = {"w": torch.full((3,), float("inf"))}
    with ckpt.Checkpointer(tmp_path / "a", state, every=ckpt.every(steps=1)) as checkpointer:
        list(checkpointer.steps(total=1))
        checkpointer.drain()
        assert checkpointer.last_save is not None
        assert checkpointer.last_save.alarms == (Alarm(NOT_FINITE, "w", inf=3, ranks=((0, 0),)),)
    with (
        pytest.raises(ckpt.SaveFailedError, match=r"w \(3 Inf, rank 0\)"),
        ckpt.Checkpointer(tmp_path / "b", state, every=ckpt.every(steps=1), alarms="raise") as checkpointer,
    ):
        list(checkpointer.steps(total=1))
    assert ckpt.steps(tmp_path / "b") == []


# ---------------------------------------------------------------- sharded


class Tokens(nn.Module):
    """An embedding of which only the rows of the first rank's shard are ever used."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.idle = nn.Embedding(8, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Without the idle layer."""
        return self.head(self.table(rows))


def sharded(rank: int, world: int, run: str) -> list[str]:
    """FSDP2: a NaN in one shard, a layer that is never used, an embedding's rows; what rank 0 says of it."""
    torch.manual_seed(rank)
    model = Tokens()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def step() -> None:
        optimizer.zero_grad()
        model(torch.tensor([rank, 2])).square().sum().backward()
        model.idle.weight.grad = model.idle.bias.grad = None
        optimizer.step()

    idle = ["model.idle.bias", "model.idle.weight"]
    with said() as lines:
        for number in (1, 2, 3):
            step()
            if number == 3 and rank == 1:
                model.head.weight.to_local().data[-1, -1] = float("nan")
            found = ckpt.save(run, number, state).result(60).alarms
            assert names(found, UNCHANGED) == (idle if number > 1 else [])
            assert "model.table.weight" not in str(found)
            if number == 3:
                assert found[0] == Alarm(NOT_FINITE, "model.head.weight", nan=1, ranks=((1, 1),))
        model.idle.requires_grad_(requires_grad=False)
        step()  # rank 1's NaN goes through all of the head and, by the gradient, the rows
        message = refused(run, 4, state)
        assert "model.head.weight (" in message
        assert "idle" not in message
        assert ckpt.latest(run) == 3
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(rank + 0.5)
        assert ckpt.save(run, 4, state, alarms="raise").result(60).alarms == ()
        dist.barrier()
        assert stored(run, 4) == ()
        assert stored(run, 3) == found
    return lines


def test_sharded(tmp_path: Path):
    """All ranks hear of it, one of them says it."""
    first, second = run_ranks(2, sharded, str(tmp_path / "run"))
    assert second == []
    assert len(first) == 2
    assert first[0].startswith("ckpt: alarm, step 2: model.idle.bias, model.idle.weight: not one byte has changed")
    assert first[1] == "ckpt: alarm, step 3: NaN or infinite elements in model.head.weight (1 NaN, rank 1)"


# ---------------------------------------------------------------- replicas


def save_until_found(run: str, step: int, state: dict[str, Any], limit: int) -> int:
    """Save until there is an alarm about replicas; the step that has it."""
    for count in range(1, limit + 1):
        if names(ckpt.save(run, step + count, state).result(60).alarms, REPLICAS):
            return step + count
    raise AssertionError(f"no alarm in {limit} saves")


def replicated(rank: int, world: int, run: str) -> list[str]:
    """DDP: one element of a large weight is another one on rank 1; random states that should differ do not."""
    torch.manual_seed(0)
    np.random.seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.RNG()}

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((2, 16), rank + 1.0)).square().mean().backward()
        optimizer.step()

    weight = model.module[0].weight.data
    moment_name = "optimizer.state.momentum_buffer.model.1.weight"
    with said() as lines:
        step()
        assert "rng.torch (ranks 0-1): random generators in the same state" in refused(run, 1, state)
        assert ckpt.latest(run) is None
        ckpt.save(run, 1, state, alarms="raise").result(60)  # told once
        before = weight[200, 3].clone()
        if rank == 1:
            weight[200, 3] += 0.5
        newest = save_until_found(run, 1, state, weight.nbytes // WINDOW_NBYTES // PLACES)
        dist.barrier()
        assert Alarm(REPLICAS, "model.0.weight", ranks=((1, 1),)) in stored(run, newest)
        for number in range(1, 4):  # what was found once is looked at until it is equal again
            assert names(ckpt.save(run, newest + number, state).result(60).alarms, REPLICAS) == ["model.0.weight"]
        assert "model.0.weight (rank 1): ranks that should hold the same bytes do not" in refused(run, 99, state)
        assert ckpt.latest(run) == newest + 3
        weight[200, 3] = before
        optimizer.state[model.module[1].weight]["momentum_buffer"][:] = float(rank)
        with pytest.raises(ckpt.SaveFailedError, match=moment_name) as caught:
            ckpt.save(run, 99, state, alarms="raise")
        assert "model.0.weight" not in str(caught.value)
        optimizer.state[model.module[1].weight]["momentum_buffer"].zero_()
        step()
        assert ckpt.save(run, 99, state, alarms="raise").result(60).alarms == ()
        with pytest.raises(ckpt.BadInputError, match=r"the ranks have different alarms: \['warn', 'off'\]"):
            ckpt.save(run, 100, state, alarms=["warn", "off"][rank])
        if rank == 1:
            weight[0, 0] += 1
        assert ckpt.save(run, 100, state, alarms="off").result(60).alarms == ()
    return [line for line in lines if "not one byte" not in line]


def test_replicas(tmp_path: Path):
    """Found in time wherever it is, named with its rank, not lost again, and said once."""
    first, second = run_ranks(2, replicated, str(tmp_path / "run"))
    assert second == []
    assert [re.sub(r": (random|ranks that).*", "", line) for line in first] == [
        "ckpt: alarm: rng.torch (ranks 0-1)",
        "ckpt: alarm: model.0.weight (rank 1)",
        "ckpt: alarm: optimizer.state.momentum_buffer.model.1.weight (rank 1)",
    ]


def hybrid(rank: int, world: int, run: str) -> None:
    """HSDP on 2 x 2: each shard has two holders; one of them goes astray on rank 2, in one optimizer's moment on 3."""
    model, optimizer = build("hsdp", world)
    torch.manual_seed(rank)
    np.random.seed(rank)
    state = {"model": model, "optimizer": optimizer, "rng": ckpt.RNG(), "count": torch.zeros(3)}
    train(model, optimizer, rank, world, 1)
    assert ckpt.save(run, 1, state, alarms="raise").result(60).alarms == ()
    weight = dict(model.named_parameters())["second.weight"]
    moment = optimizer.state[dict(model.named_parameters())["first.weight"]]["exp_avg"]
    train(model, optimizer, rank, world, 1)
    if rank == 2:
        weight.to_local().data[0, 0] += 1
    if rank == 3:
        moment.to_local()[-1, -1] += 1
        state["count"] += 1
    found = ckpt.save(run, 2, state).result(60).alarms
    assert found == (
        Alarm(REPLICAS, "count", ranks=((3, 3),)),
        Alarm(REPLICAS, "model.second.weight", ranks=((2, 2),)),
        Alarm(REPLICAS, "optimizer.state.exp_avg.model.first.weight", ranks=((3, 3),)),
    )
    assert "count (rank 3), model.second.weight (rank 2), optimizer.state.exp_avg" in refused(run, 3, state)
    # Ranks that shard tensors may share random states on purpose: said, never refused.
    other = f"{run}-other"
    torch.manual_seed(rank // 2)
    ckpt.save(other, 1, {"w": weight.detach().clone().fill_(1), "rng": ckpt.RNG()}, alarms="raise").result(60)
    dist.barrier()
    assert stored(other, 1) == tuple(Alarm(RANDOM, "rng.torch", ranks=pair) for pair in (((0, 1),), ((2, 3),)))


def test_hybrid(tmp_path: Path):
    """Each set of replicas is compared by itself."""
    run_ranks(4, hybrid, str(tmp_path / "run"))
