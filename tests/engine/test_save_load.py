"""Save and load in one process: what goes in comes out, and what must be refused is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.engine.job import keeper_client
from ckpt.format import records
from tests.keeper.conftest import wait_for


def trained(seed: int = 0) -> dict[str, object]:
    """A small model with a stepped optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "epoch": 20}


def fresh() -> dict[str, object]:
    """The same shapes, other numbers, an optimizer that never stepped."""
    torch.manual_seed(99)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "epoch": 0}


def assert_same(a: dict[str, object], b: dict[str, object]) -> None:
    """Model, optimizer and epoch bit-equal."""
    assert a["epoch"] == b["epoch"]
    for (name, x), (other, y) in zip(a["model"].state_dict().items(), b["model"].state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x, y), name
    x, y = a["optimizer"].state_dict(), b["optimizer"].state_dict()
    assert x["param_groups"] == y["param_groups"]
    assert x["state"].keys() == y["state"].keys()
    for key, entry in x["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, y["state"][key][name]), (key, name)


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_round_trip(tmp_path: Path, encode: str) -> None:
    """Model, optimizer and value come back bit for bit."""
    state, target = trained(), fresh()
    report = ckpt.save(tmp_path / "run", 3, state, encode=encode).result()
    assert (report.step, report.attempt) == (3, "w1.1")
    loaded = ckpt.load(tmp_path / "run", target)
    assert (loaded.step, loaded.missing, loaded.unexpected, loaded.skipped) == (3, (), (), ())
    assert_same(state, target)
    assert ckpt.latest(tmp_path / "run") == 3
    assert ckpt.verify(tmp_path / "run").ok


def test_read_needs_no_template(tmp_path: Path) -> None:
    """The nested state comes back with whole tensors and plain values."""
    state = {"a": {"b": torch.arange(6).view(2, 3)}, "list": [1, (2.0, None)], "model": torch.nn.Linear(2, 2)}
    ckpt.save(tmp_path / "run", 1, state, wait=True)
    found = ckpt.read(tmp_path / "run")
    assert torch.equal(found["a"]["b"], state["a"]["b"])
    assert found["list"] == [1, (2.0, None)]
    assert torch.equal(found["model"]["weight"], state["model"].weight)


def test_what_the_caller_changes_after_save_is_not_saved(tmp_path: Path) -> None:
    """save() returns with everything copied."""
    state = {"w": torch.ones(1000), "n": [1]}
    pending = ckpt.save(tmp_path / "run", 1, state)
    state["w"].fill_(2)
    state["n"].append(2)
    pending.result()
    found = ckpt.read(tmp_path / "run")
    assert torch.equal(found["w"], torch.ones(1000))
    assert found["n"] == [1]


def test_a_damaged_latest_falls_back_and_says_why(tmp_path: Path) -> None:
    """A flipped payload bit in step 2: "latest" loads step 1 and names the chunk; step=2 is refused."""
    for step in (1, 2):
        ckpt.save(tmp_path / "run", step, {"w": torch.full((5000,), float(step))}, wait=True)
    (file,) = (tmp_path / "run").glob("step-00000002-*/state-*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    target = {"w": torch.zeros(5000)}
    report = ckpt.load(tmp_path / "run", target)
    assert report.step == 1
    assert target["w"][0] == 1
    assert report.skipped[0].step == 2
    assert "w: chunk 0: digest" in report.skipped[0].why
    assert "must not be used" not in report.skipped[0].why
    with pytest.raises(ckpt.DamagedError, match=r"chunk 0.*filled before the damage was met, and must not be used"):
        ckpt.load(tmp_path / "run", target, step=2)


def test_after_a_fall_back_the_new_line_is_live(tmp_path: Path) -> None:
    """Damaged 300, resumed from 200, saved a new 300: that one is live, the old one is abandoned and says why."""
    run = tmp_path / "run"
    for step in (100, 200, 300):
        ckpt.save(run, step, {"w": torch.full((5000,), float(step))}, wait=True)
    (file,) = run.glob("step-00000300-*/state-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    target = {"w": torch.zeros(5000)}
    assert ckpt.load(run, target).step == 200
    target["w"] += 7
    ckpt.save(run, 300, target, wait=True)
    assert ckpt.steps(run) == [100, 200, 300]
    assert ckpt.read(run, step=300)["w"][0] == 207
    states = {s.attempt.label: (s.state, s.why) for s in ckpt.run.Run.open(run).survey().steps}
    assert states["w2.1"] == ("live", "")
    assert states["w1.3"][0] == "abandoned"
    assert "went on from step 200" in states["w1.3"][1]


ZOMBIE = """
import sys, torch, ckpt
run = sys.argv[1]
ckpt.save(run, 1, {"w": torch.ones(3)}, wait=True)
print("saved", flush=True)
sys.stdin.readline()
try:
    ckpt.save(run, 2, {"w": torch.ones(3)}, wait=True)
except ckpt.FencedError as error:
    print("fenced:", error, flush=True)
try:
    ckpt.save(run, 3, {"w": torch.ones(3)}, wait=True)
except ckpt.FencedError as error:
    print("still fenced", flush=True)
print("loaded", ckpt.load(run, {"w": torch.zeros(3)}).step, flush=True)
print("saved", ckpt.save(run, 3, {"w": torch.ones(3)}).result().attempt, flush=True)
"""


def test_a_zombie_commits_nothing_and_is_told_who_holds_the_run(tmp_path: Path) -> None:
    """A writer that wakes up after another one opened the run stops, by name, until it loads again."""
    run = str(tmp_path / "run")
    env = {**os.environ, "CKPT_JOB": "zombie-job", "CKPT_LINGER_S": "1"}
    zombie = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert zombie.stdin
    assert zombie.stdout
    assert zombie.stdout.readline() == "saved\n"
    ckpt.load(run, {"w": torch.zeros(3)})
    ckpt.save(run, 2, {"w": torch.full((3,), 5.0)}, wait=True)
    out, _ = zombie.communicate("go\n", timeout=60)
    assert zombie.returncode == 0
    assert "writer 2 holds the run" in out
    assert f"pid {os.getpid()}" in out
    assert out.endswith("still fenced\nloaded 2\nsaved w3.1\n")
    assert [s.attempt.label for s in ckpt.run.Run.open(run).survey().steps if s.commit] == ["w1.1", "w2.1", "w3.1"]
    assert ckpt.read(run, step=2)["w"][0] == 5


def test_strict_lists_everything_and_touches_nothing(tmp_path: Path) -> None:
    """Missing, unexpected and mismatched together in one error."""
    run = tmp_path / "run"
    ckpt.save(run, 1, {"s": {"a": torch.zeros(4, 3), "b": torch.ones(2), "c": torch.zeros(5)}}, wait=True)
    target = {"s": {"a": torch.full((4, 2), 9.0), "b": torch.zeros(2), "d": torch.zeros(1)}}
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(run, target)
    for expected in ("s.a: float32 (4, 3) in the step, float32 (4, 2) in the state", "s.c", "s.d"):
        assert expected in str(caught.value)
    assert torch.equal(target["s"]["b"], torch.zeros(2))
    report = ckpt.load(run, target, strict=False)
    assert torch.equal(target["s"]["b"], torch.ones(2))
    assert target["s"]["a"][0, 0] == 9
    assert report.missing == ("s.d",)
    assert report.unexpected == ("s.c",)


def test_a_step_before_the_runs_own_is_refused(tmp_path: Path) -> None:
    """Starting anew in a run that has steps would hide behind them at the next resume."""
    run = tmp_path / "run"
    ckpt.save(run, 5, {"x": 1}, wait=True)
    with pytest.raises(ckpt.BadInputError, match="step 3 is before step 5"):
        ckpt.save(run, 3, {"x": 1})


def test_nothing_is_written_for_a_value_without_a_typed_form(tmp_path: Path) -> None:
    """Refused by name, before a byte."""
    with pytest.raises(ckpt.UnsupportedValueError, match=r"state\['f'\]"):
        ckpt.save(tmp_path / "run", 1, {"f": lambda: 0})
    assert not (tmp_path / "run").exists()


def test_world_size_without_a_process_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every rank would save the whole state."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ckpt.BadInputError, match="init_process_group"):
        ckpt.save(tmp_path / "run", 1, {"x": 1})


def test_import_does_not_import_torch() -> None:
    """The command line must start fast."""
    code = "import ckpt, sys; ckpt.CkptError; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_refused_step_opens_no_writer(tmp_path: Path) -> None:
    """A mistake must not fence whoever writes the run now."""
    run = tmp_path / "run"
    code = "import ckpt, sys; ckpt.save(sys.argv[1], 5, {'x': 1}, wait=True)"
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)
    with pytest.raises(ckpt.BadInputError, match="step 3 is before step 5"):
        ckpt.save(run, 3, {"x": 1})
    assert [path.name for path in (run / "writers").iterdir()] == ["000001.json"]


def test_many_runs_share_one_connection(tmp_path: Path) -> None:
    """A process has one keeper, whatever number of runs it saves to."""

    def descriptors(run: Path) -> list[str]:
        ckpt.save(run, 1, {"x": torch.ones(3)}, wait=True)
        wait_for(lambda: not keeper_client(0).is_warming, "no arena is on its way in a descriptor")
        return os.listdir("/proc/self/fd")

    before = descriptors(tmp_path / "first")
    for i in range(5):
        assert len(descriptors(tmp_path / str(i))) == len(before)


def test_a_damaged_layout_is_mended_by_the_next_save(tmp_path: Path) -> None:
    """Its name says what its bytes must be; the step before is whole again too."""
    run = tmp_path / "run"
    ckpt.save(run, 1, {"w": torch.ones(3)}, wait=True)
    (layout,) = (run / "layouts").iterdir()
    layout.write_bytes(layout.read_bytes()[:-2])
    assert not ckpt.verify(run).ok
    ckpt.save(run, 2, {"w": torch.ones(3)}, wait=True)
    assert ckpt.verify(run, step=1).ok
    assert ckpt.verify(run, step=2).ok


def test_a_newer_format_is_refused_not_passed_over(tmp_path: Path) -> None:
    """A step of an unknown feature may be whole: going back behind it unasked would lose it."""
    run = tmp_path / "run"
    for step in (1, 2):
        ckpt.save(run, step, {"w": torch.full((3,), float(step))}, wait=True)
    (path,) = run.glob("step-00000002-*/COMMIT")
    line = path.read_bytes().splitlines()[0].replace(b'"features":[]', b'"features":["parity9"]')
    path.write_bytes(line + b"\n" + records.digest(line).encode() + b"\n")
    for refused in (lambda: ckpt.load(run, {"w": torch.zeros(3)}), lambda: ckpt.latest(run), lambda: ckpt.read(run)):
        with pytest.raises(ckpt.UnsupportedFormatError, match=r"parity9.*written by ckpt"):
            refused()
    target = {"w": torch.zeros(3)}
    assert ckpt.load(run, target, step=1).step == 1
    assert target["w"][0] == 1
