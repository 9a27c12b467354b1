"""S17: COMMIT is the last durable act of a save, and older steps go only after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.testing import Operation, read_log, store_env
from tests.ranks import run_ranks


def made(value: int) -> dict[str, Any]:
    """A state of three data files, every number of which tells its step."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(value), momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return {"model": model, "optimizer": optimizer, "w": torch.full((5,), float(value)), "step": value}


def filled(tree: Any) -> set[float]:
    """Every number in a state as ``ckpt.read`` gives it, but for an optimizer's settings."""
    if isinstance(tree, torch.Tensor):
        return {float(value) for value in tree.flatten()}
    if isinstance(tree, dict):
        return set().union(*(filled(value) for key, value in tree.items() if key not in {"param_groups", "rng"}))
    return {float(tree)}


def two_steps(_rank: int, _world: int, run: str) -> None:
    """Step 1, then step 2, of which one is to be kept."""
    state = made(1)
    with ckpt.Checkpointer(run, state, keep=ckpt.keep(last=1)) as checkpointer:
        checkpointer.save(1)
        state.update(made(2))
        checkpointer.save(2)


def test_s17_commit_comes_last_and_deleting_after_it(tmp_path: Path) -> None:
    """Recorded: files, parts, layout and index end before COMMIT begins; it ends before step 1 is touched."""
    log = tmp_path / "log"
    record = store_env({"wrap": "recording", "program": "keeper", "operation": "mutating", "log": log})
    run_ranks(2, two_steps, str(tmp_path / "run"), env=record)
    assert ckpt.steps(tmp_path / "run") == [2]
    done = read_log(log)
    assert {operation.outcome for operation in done} <= {"ok", "AlreadyExistsError"}

    def of(step: int, *ops: str, key: Callable[[str], bool] = lambda _: True) -> list[Operation]:
        folder = f"step-{step:08}-"
        return [o for o in done if o.key.startswith(folder) and o.op in ops and key(o.key.split("/")[-1])]

    first, second = of(1, "delete", "delete_folder"), of(2, "close", "create")
    (commit,) = of(2, "create", key=lambda name: name == "COMMIT")
    before = [operation for operation in second if operation is not commit]
    written = sorted(operation.key.split("/")[1] for operation in before)
    groups = [f"{g}-0000{r}-of-00002.safetensors" for g in ("model", "optimizer", "state") for r in range(2)]
    parts = [f"part-0000{rank}-of-00002.json" for rank in range(2)]
    assert set(written) >= {*parts, "model.safetensors.index.json"}
    assert set(written) & set(groups)
    assert {name for name in written if name.endswith(".safetensors")} == {
        path.name for path in next((tmp_path / "run").glob("step-00000002-*")).glob("*.safetensors")
    }
    assert all(operation.end_ns < commit.start_ns for operation in before)
    for rank, part in enumerate(parts):
        (created,) = of(2, "create", key=lambda name, part=part: name == part)
        files = of(2, "close", key=lambda name, rank=rank: f"-0000{rank}-of-" in name)
        assert all(closed.end_ns < created.start_ns for closed in files)
    layouts = [o for o in done if o.key.startswith("layouts/")]
    assert layouts
    assert layouts[0].end_ns < of(1, "create", key=lambda name: name == "COMMIT")[0].start_ns
    assert [(operation.op, operation.key.split("/")[1:]) for operation in first] == [
        ("delete", ["COMMIT"]),
        ("delete_folder", []),
    ]
    assert commit.end_ns < first[0].start_ns
    assert first[0].end_ns < first[1].start_ns
    assert not of(2, "delete", "delete_folder")


def save_first(_rank: int, _world: int, run: str) -> None:
    """Step 1."""
    with ckpt.Checkpointer(run, made(1)) as checkpointer:
        checkpointer.save(1)


def save_second(_rank: int, _world: int, run: str) -> str:
    """Restore step 1 and save step 2, through a keeper that may die; the error, if there was one."""
    state = made(0)
    try:
        with ckpt.Checkpointer(run, state, keep=ckpt.keep(last=1)) as checkpointer:
            assert checkpointer.restored_step == 1
            state.update(made(2))
            checkpointer.save(2)
    except ckpt.KeeperError as error:
        return str(error)
    return ""


def look(_rank: int, _world: int, folder: str, points: int) -> list[tuple[int | None, bool, set[float]]]:
    """A fresh process: what is latest, whether it verifies, what it holds; and that a job goes on from there."""
    found = []
    for point in range(points):
        run = f"{folder}/{point}"
        newest, ok, holds = ckpt.latest(run), ckpt.verify(run).ok, filled(ckpt.read(run))
        state = made(0)
        with ckpt.Checkpointer(run, state) as checkpointer:
            assert checkpointer.restored_step == newest
            assert filled({"w": state["w"], **state["model"].state_dict()}) == {float(newest)}
            state.update(made(3))
            checkpointer.save(3)
        assert (ckpt.latest(run), filled(ckpt.read(run))) == (3, {3.0})
        found.append((newest, ok, holds))
    return found


def test_s17_a_crash_at_every_operation(tmp_path: Path) -> None:
    """The keeper dies at operation k of save and retention, for every k: step 1 or 2 is latest, and it is whole.

    The report's other half, a pointer file that names an unusable step or is gone, has no counterpart:
    there is no pointer, and what is latest is told by the COMMIT of the steps themselves.
    """
    base, log = tmp_path / "base", tmp_path / "points"
    run_ranks(1, save_first, str(base), process_group=False)

    def save_and_crash(run: Path, crash: dict[str, Any]) -> str:
        shutil.copytree(base, run)
        environment = store_env({"wrap": "crash", "program": "keeper", **crash})
        environment["XDG_RUNTIME_DIR"] = str(tmp_path)
        (raised,) = run_ranks(1, save_second, str(run), env=environment, process_group=False)
        return raised

    assert not save_and_crash(tmp_path / "whole", {"log": log})  # without a crash: counts the points
    assert ckpt.steps(tmp_path / "whole") == [2]
    operations = [line.split()[1:3] for line in log.read_text().splitlines()]
    names = [(operation, key.split("/")[-1]) for operation, key in operations]
    committing = names.index(("create", "COMMIT"))
    assert len(names) > committing + 5 > 10
    for point in range(len(operations)):
        assert "is gone" in save_and_crash(tmp_path / str(point), {"at": point}), operations[point]

    found = run_ranks(1, look, str(tmp_path), len(operations), process_group=False)[0]
    newest = [step for step, _, _ in found]
    assert newest == [1] * (committing + 1) + [2] * (len(operations) - committing - 1)
    assert names[committing + 1][0] == "delete"
    for point, (step, ok, holds) in enumerate(found):
        assert ok, operations[point]
        assert holds == {float(step)}, operations[point]
