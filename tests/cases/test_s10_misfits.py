"""S10: one error reports all that does not fit and nothing is touched; with strict=False the rest is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from tests.ranks import run_ranks

A_MISFIT = "a: float32 (4, 3) in the step, float32 (4, 2) in the state"


def saved() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(4, 3), "b": torch.ones(2), "c": torch.zeros(5)}


def target() -> dict[str, torch.Tensor]:
    return {"a": torch.full((4, 2), 9.0), "b": torch.zeros(2), "d": torch.zeros(1)}


def assert_untouched(state: dict[str, torch.Tensor], *, but: str = "") -> None:
    expected = target()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], torch.ones(2) if name == but else tensor), name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1: the tensors at the top level. Step 2: one level down."""
    path = tmp_path_factory.mktemp("s10") / "run"
    ckpt.save(path, 1, saved(), wait=True)
    ckpt.save(path, 2, {"x": saved()}, wait=True)
    return path


def sections(error: ckpt.MismatchError) -> dict[str, list[str]]:
    """First word of each title of the message -> the lines below it."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in str(error).splitlines()[1:-1]:
        if line.startswith("    "):
            found[title].append(line.strip())
        else:
            title = line.strip().partition(",")[0].rstrip(":")
            found[title] = []
    return found


def test_s10_strict_at_the_top_level(run: Path) -> None:
    """One error names d, both shapes of a, and c, which the state does not ask for; nothing has changed."""
    state = target()
    held = dict(state)
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(run, state, step=1)
    assert sections(caught.value) == {"missing": ["d"], "mismatched": [A_MISFIT], "ignored": ["c"]}
    assert_untouched(state)
    assert all(state[name] is tensor for name, tensor in held.items())


def test_s10_strict_below_the_top_level(run: Path) -> None:
    """There c is unexpected; still one error, and nothing has changed."""
    state = {"x": target()}
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(run, state, step=2)
    misfits = {"missing": ["x.d"], "unexpected": ["x.c"], "mismatched": [f"x.{A_MISFIT}"]}
    assert sections(caught.value) == misfits
    assert_untouched(state["x"])


def test_s10_not_strict_loads_the_rest_and_reports(run: Path) -> None:
    """b arrives; a and d stay; the report lists all that did not fit."""
    state = target()
    report = ckpt.load(run, state, step=1, strict=False)
    assert (report.missing, report.unexpected, report.mismatched) == (("d",), (), (A_MISFIT,))
    assert report.ignored == ("c",)
    assert_untouched(state, but="b")
    nested = {"x": target()}
    report = ckpt.load(run, nested, step=2, strict=False)
    assert (report.missing, report.unexpected, report.mismatched) == (("x.d",), ("x.c",), (f"x.{A_MISFIT}",))
    assert report.ignored == ()
    assert_untouched(nested["x"], but="b")


def test_s10_a_key_that_is_not_asked_for_is_no_error(run: Path) -> None:
    """Leaving a top-level key out of the state is how a part of a step is loaded; the report says so."""
    state = {"b": torch.zeros(2)}
    report = ckpt.load(run, state, step=1)
    assert report.ignored == ("a", "c")
    assert torch.equal(state["b"], torch.ones(2))


@pytest.mark.parametrize(
    ("stored", "wanted"), [((2, 6), (3, 4)), ((12,), (12, 1)), ((), (1,)), ((0, 3), (3, 0)), ((5,), (4,)), ((4,), (5,))]
)
def test_s10_another_shape_fails_whatever_its_size(
    tmp_path: Path, stored: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    """As many elements, fewer or more: both shapes are named, in a tensor, a module and an array."""
    ckpt.save(tmp_path / "run", 1, holders(stored, 1.0), wait=True)
    state = holders(wanted, 9.0)
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(tmp_path / "run", state)
    assert sections(caught.value) == {
        "mismatched": [
            f"tensor: float32 {stored} in the step, float32 {wanted} in the state",
            f"module.w: float32 {stored} in the step, float32 {wanted} in the state",
            f"array: ndarray float32 {stored} in the step, ndarray float32 {wanted} in the state",
        ]
    }
    assert (state["tensor"] == 9).all()
    assert (state["module"].w == 9).all()
    assert (state["array"] == 9).all()


def holders(shape: tuple[int, ...], value: float) -> dict[str, object]:
    """One shape as a tensor, as a module's parameter and as an array."""
    module = nn.Module()
    module.w = nn.Parameter(torch.full(shape, value))
    return {"tensor": torch.full(shape, value), "module": module, "array": torch.full(shape, value).numpy()}


def model_of(width: int, *, extra: str) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"same": nn.Linear(2, 2), "sized": nn.Linear(2, width, bias=False), extra: nn.Linear(1, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_s10_a_model_and_its_optimizer(tmp_path: Path) -> None:
    """All names of both in one error; without strict, moments of what does not fit stay as they are too."""
    ckpt.save(tmp_path / "run", 1, model_of(3, extra="old"), wait=True)
    state = model_of(4, extra="new")
    model, optimizer = state["model"], state["optimizer"]
    with torch.no_grad():
        for tensor in (*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())):
            tensor.fill_(7)
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(tmp_path / "run", state)
    found = sections(caught.value)
    assert set(found) == {"missing", "unexpected", "mismatched"}
    for kind, name in (("missing", "new"), ("unexpected", "old")):
        for start in ("model", "optimizer.params.model"):
            assert f"{start}.{name}.weight" in found[kind]
            assert f"{start}.{name}.bias" in found[kind]
        assert len(found[kind]) == 4
    sized = "model.sized.weight: float32 (3, 2) in the step, float32 (4, 2) in the state"
    assert found["mismatched"] == [sized]
    assert all((parameter == 7).all() for parameter in model.parameters())
    assert all((moments["exp_avg"] == 7).all() for moments in optimizer.state.values())

    report = ckpt.load(tmp_path / "run", state, strict=False)
    assert report.mismatched == (sized,)
    assert sorted(report.missing) == sorted(found["missing"])
    assert sorted(report.unexpected) == sorted(found["unexpected"])
    changed = {name for name, parameter in model.named_parameters() if not (parameter == 7).all()}
    assert changed == {"same.weight", "same.bias"}
    moved = {name for name, p in model.named_parameters() if not (optimizer.state[p]["exp_avg"] == 7).all()}
    assert moved == changed


def misfit_on_one_rank(rank: int, world: int, run: str) -> tuple[str, str, bool]:
    """Rank 1's template has a shape of its own."""
    state = saved()
    if rank == 1:
        state["a"] = torch.full((4, 2), 9.0)
    state["b"].zero_()
    try:
        ckpt.load(run, state, step=1)
    except ckpt.CkptError as error:
        return type(error).__name__, str(error), bool((state["b"] == 0).all())
    return "", "", False


def test_s10_a_misfit_on_one_rank_touches_none(run: Path) -> None:
    """Both ranks raise, the other one names the rank and its misfit, and neither has loaded anything."""
    other, own = run_ranks(2, misfit_on_one_rank, str(run))
    assert own[0] == "MismatchError"
    assert other[0] in {"RankError", "MismatchError"}
    assert "rank 1" in other[1]
    for _, text, untouched in (other, own):
        assert A_MISFIT in text
        assert untouched
