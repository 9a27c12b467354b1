"""Operations to be killed at every point, and what one such round is: die there, look, do it again, prune, look."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.engine.job import keeper_client
from ckpt.engine.retention import prune
from ckpt.keeper.client import KeeperClient
from ckpt.reading.verify import verify_all
from ckpt.run import Run
from ckpt.testing.kill_points import KILL_ENV, Event, Point, died_at, install, kill_env, read_record
from ckpt.testing.power_cut import Disk
from tests.keeper.conftest import wait_for
from tests.ranks import PRELOAD

LONG_S = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


# -- what is done to a run, in a process of its own ----------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    """A state of a module, two dtypes, a scalar and a value: all of it says which step it is."""
    model = torch.nn.Linear(30, 40)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, step)
    return {
        "model": model,
        "w": torch.full((3000,), float(step)),
        "b": torch.full((77,), step, dtype=torch.int16),
        "s": torch.tensor(float(step)),
        "epoch": step,
    }


def save_step(run: str, step: int, tell: Callable[[Any], None], keep_last: int | None = None) -> None:
    """What a training job does: restore, train, save, wait until it is committed, leave."""
    state = state_of(0)
    with ckpt.Checkpointer(run, state, keep=ckpt.keep(last=keep_last)) as checkpointer:
        if checkpointer.restored_step is not None:
            assert is_of_step(state) == checkpointer.restored_step
        state["model"].load_state_dict(state_of(step)["model"].state_dict())
        for name in ("w", "b", "s"):
            state[name].fill_(step)
        state["epoch"] = step
        pending = checkpointer.save(step)
        wait_for(lambda: pending.staged or pending.done, "the save is staged", LONG_S)
        tell("staged")
        pending.result(LONG_S)
        tell("committed")
        client = keeper_client(0)
        wait_for(lambda: not client.is_warming, "the other arena is there", LONG_S)


def is_of_step(state: dict[str, Any]) -> int | None:
    """The step that all of a state is of; None for a mixture."""
    model = state["model"]
    tensors = [*(model.state_dict() if isinstance(model, torch.nn.Module) else model).values(), *map(state.get, "wbs")]
    found = {state["epoch"], *(float(extreme) for tensor in tensors for extreme in tensor.aminmax())}
    return int(found.pop()) if len(found) == 1 else None


def first_save(run: str, tell: Callable[[Any], None]) -> None:
    save_step(run, 1, tell)


def later_save(run: str, tell: Callable[[Any], None]) -> None:
    save_step(run, 2, tell, keep_last=1)


def verb(*words: str) -> Callable[[str, Callable[[Any], None]], None]:
    """A verb of the command line; RUN and COPY stand for the run, and for what lies beside it."""

    def act(run: str, tell: Callable[[Any], None]) -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            code = main([word.replace("RUN", run).replace("COPY", f"{run}-copy") for word in words])
        assert code == 0, f"exit code {code}"
        tell("done")

    return act


def steps_of(*steps: int) -> Callable[[str], None]:
    """Makes a run of these steps, the last of them once more and then abandoned, with debris of a save beside it."""

    def make(run: str) -> None:
        for step in steps:
            ckpt.save(run, step, state_of(step), wait=True)
        if len(steps) > 1:
            Run.open(run).rollback(steps[-2])
            ckpt.load(run, state_of(0))
            ckpt.save(run, steps[-1], state_of(steps[-1]), wait=True)
            (newest,) = Path(run).glob(f"step-{steps[-1]:08}-w3.1")
            debris = newest.with_name(f"step-{steps[-1]:08}-w2.9")
            shutil.copytree(newest, debris)
            (debris / "COMMIT").unlink()

    return make


def make_damaged(run: str) -> None:
    """A run of two steps, a copy of it, and damage of several kinds to the newer step."""
    for step in (1, 2):
        ckpt.save(run, step, state_of(step), wait=True, parity=1)
    verb("copy", "RUN", "COPY", "--all")(run, lambda _: None)
    (folder,) = Path(run).glob("step-00000002-*")
    model = folder / "model-00000-of-00001.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    os.truncate(folder / "state-00000-of-00001.safetensors", 100)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "part-00000-of-00001.json").unlink()


@dataclass(frozen=True)
class Operation:
    """What is done, to what, and what the latest step is before and after."""

    name: str
    process: str  # what its process is called in the names of points
    act: Callable[[str, Callable[[Any], None]], None]
    old: int | None
    new: int
    make: Callable[[str], None]
    stay: tuple[int, ...]  # live steps that no kill may take
    left: tuple[int, ...]  # all live steps when it was done
    looked_at: str = "RUN"
    between: tuple[int, ...] = ()  # what the latest step may also be on the way
    damaged: tuple[str, ...] = ()  # files that are, until it is done

    def path(self, run: str) -> str:
        """The run that is looked at."""
        return self.looked_at.replace("RUN", run).replace("COPY", f"{run}-copy")


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("first save", "trainer", first_save, None, 1, steps_of(), (), (1,)),
        Operation("save and retention", "trainer", later_save, 1, 2, steps_of(1), (), (2,)),
        Operation(
            "prune", "prune", verb("prune", "RUN", "--keep-last=1", "--grace-s=0"), 3, 3, steps_of(1, 2, 3), (3,), (3,)
        ),
        Operation("rollback", "rollback", verb("rollback", "RUN", "--to=1"), 3, 1, steps_of(1, 2, 3), (1,), (1,)),
        Operation(
            "copy",
            "copy",
            verb("copy", "RUN", "COPY", "--all"),
            None,
            3,
            steps_of(1, 2, 3),
            (),
            (1, 2, 3),
            "COPY",
            (1, 2),
        ),
        Operation(
            "repair",
            "repair",
            verb("repair", "RUN", "--from=COPY"),
            2,
            2,
            make_damaged,
            (1,),
            (1, 2),
            damaged=(
                "model-00000-of-00001.safetensors",
                "state-00000-of-00001.safetensors",
                "model.safetensors.index.json",
                "part-00000-of-00001.json",
            ),
        ),
    )
}


# -- a round, in the test's process ---------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What a fresh process sees of a run."""

    latest: int | None
    steps: dict[int, int | None]  # each live step that can be read, and the step that all its content is of
    problems: list[str]
    files: set[str]  # that have problems, without their folders
    debris: list[str]


def look(run: str) -> Look:
    """Read everything that there is."""
    survey = Run.open(run).survey()
    steps, problems = {}, [state.why for state in survey.steps if state.state in {"damaged", "unsupported"}]
    for step in ckpt.steps(run) if survey.steps else []:
        try:
            steps[step] = is_of_step(ckpt.read(run, step=step))
        except ckpt.DamagedError as error:
            problems.append(f"step {step}: {error}")
    found = [problem for report in (verify_all(run) if survey.live else []) for problem in report.problems]
    debris = [state.attempt.folder for state in survey.steps if state.state == "incomplete"]
    return Look(
        latest=ckpt.latest(run),
        steps=steps,
        problems=problems + [str(problem) for problem in found],
        files={os.path.basename(problem.file) for problem in found},
        debris=debris + [str(path) for path in Path(run).rglob("repaired-*")],
    )


def look_again(run: str, operation: str) -> tuple[Look, Look, Look]:
    """What is there; what is there when the operation was done once more; and when the debris was swept."""
    this = OPERATIONS[operation]
    path = this.path(run)
    first = look(path)
    if path != run:
        first.problems.extend(look(run).problems)
    this.act(run, lambda _: None)
    second = look(path)
    prune(path, grace_s=0)
    return first, second, look(path)


def _main(pipe: Connection, environment: dict[str, str], stderr: str, what: str, run: str) -> None:
    """A process that does one operation, or looks at what became of it."""
    os.environ.update(environment)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    torch.set_num_threads(1)
    install()
    try:
        if KILL_ENV in environment:
            OPERATIONS[what].act(run, lambda said: pipe.send(("said", said)))
        elif what.startswith("make "):
            OPERATIONS[what.removeprefix("make ")].make(run)
        else:
            pipe.send(("looks", look_again(run, what)))
    except BaseException as error:  # noqa: BLE001 - the round decides what was to be expected
        pipe.send(("raised", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


@dataclass
class Outcome:
    """What became of one round."""

    point: str
    said: list[str]
    raised: str
    exitcode: int | None
    looks: tuple[Look, Look, Look] | None = None

    def __str__(self) -> str:
        latest = "nothing" if self.looks is None or self.looks[0].latest is None else f"step {self.looks[0].latest}"
        told = f"; the other process: {self.raised.partition(':')[0]}" if self.raised else ""
        return f"{self.point}: latest is {latest}{told}"


class Rounds:
    """Rounds of one operation, one after the other. Closed by ``close``."""

    def __init__(self, operation: Operation, folder: Path) -> None:
        self.operation, self.folder = operation, folder
        folder.mkdir()
        # One keeper for all processes that look and do it again: it stays, since this process stays connected to it.
        self._rescue = _keeper_env(folder / "rescue")
        self._client = _connect(self._rescue)
        self._base = folder / "base"
        (self._base / "disk").mkdir(parents=True)
        made = _run_process(self._rescue, self._base, f"make {operation.name}")
        assert not made.raised, made.raised

    def record(self) -> list[Point]:
        """All points of the operation, in their order."""
        above = self._prepare("record")
        self._act_whole(above, {"": above / "disk" / "run", "copy": above / "disk" / "run-copy"})
        return [event.point for event in read_record(above / "record")]

    def trace(self) -> tuple[Disk, list[Event]]:
        """The disk before the operation, and then all that happens; the run's root is called ``run``."""
        above = self._prepare("trace")
        disk = Disk(above / "disk")
        self._act_whole(above, {"": above / "disk"})
        return disk, read_record(above / "record")

    def kill_at(self, point: Point, number: int) -> Outcome:
        """Die at a point; then a fresh process looks, does it again, prunes and looks."""
        above = self._prepare(f"round-{number}")
        outcome = self._act(above, {"": above / "disk" / "run", "copy": above / "disk" / "run-copy"}, point)
        assert died_at(above / "record") == str(point), f"nobody died at {point}: {outcome.said} {outcome.raised}"
        looked = _run_process(self._rescue, above, self.operation.name)
        assert looked.looks is not None, f"{point}: {outcome.said} {outcome.raised}\nthen: {looked.raised}"
        outcome.looks = looked.looks
        shutil.rmtree(above)
        return outcome

    def close(self) -> None:
        """Let the keeper go."""
        self._client.close()
        _end_keepers(self._rescue["CKPT_JOB"], ask=True)

    def _prepare(self, name: str) -> Path:
        """A copy of the base."""
        return shutil.copytree(self._base, self.folder / name)

    def _act_whole(self, above: Path, scopes: dict[str, Path]) -> None:
        outcome = self._act(above, scopes, None)
        assert (outcome.exitcode, outcome.raised) == (0, ""), outcome.raised

    def _act(self, above: Path, scopes: dict[str, Path], kill: Point | None) -> Outcome:
        """Do the operation; returns when all its processes have ended."""
        environment = _keeper_env(above / "runtime")
        watch = kill_env(
            self.folder / "start",
            {**scopes, "the job's": above / "runtime" / "ckpt"},
            record=above / "record",
            process=self.operation.process,
            kill=kill,
        )
        outcome = _run_process({**environment, **watch}, above, self.operation.name)
        outcome.point = str(kill)
        # A keeper that lost its trainer too early would wait for another one; what is staged it finishes first.
        _end_keepers(environment["CKPT_JOB"], ask=kill is not None)
        return outcome


def _keeper_env(folder: Path) -> dict[str, str]:
    folder.mkdir(mode=0o700, parents=True)
    # LOCAL_WORLD_SIZE: as on a node that has a core for the keeper, which then writes behind the copy.
    return {"XDG_RUNTIME_DIR": str(folder), "CKPT_JOB": str(folder), "CKPT_LINGER_S": "0", "LOCAL_WORLD_SIZE": "1"}


def _connect(environment: dict[str, str]) -> KeeperClient:
    """Be one more rank of that job, which saves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return KeeperClient.connect(1_000_000)


def _run_process(environment: dict[str, str], above: Path, what: str) -> Outcome:
    """One process forked from the server; what it said until it ended or died."""
    run = str(above / "disk" / "run")
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_main, args=(theirs, environment, str(above / "stderr"), what, run))
    process.start()
    theirs.close()
    outcome = Outcome("", [], "", None)
    try:
        with contextlib.suppress(EOFError):
            while True:
                assert ours.poll(LONG_S), f"{what}: no answer in {LONG_S} s"
                kind, value = ours.recv()
                if kind == "said":
                    outcome.said.append(value)
                elif kind == "raised":
                    outcome.raised = value
                else:
                    outcome.looks = value
        process.join(LONG_S)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
    outcome.exitcode = process.exitcode
    return outcome


def _end_keepers(job: str, *, ask: bool) -> None:
    """See all keepers of a job gone, whoever knows of them; ``ask`` them to go."""
    mark = f"CKPT_JOB={job}".encode()

    def left() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    for pid in left() if ask else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not left(), "the keepers of the job have ended", LONG_S)
