"""The machine loses its power at any moment: whatever was not synced is lost, kept or torn, in any combination.

Every image of the disk that a crash could leave is looked at. What was acknowledged is in each; each has the old or
the new step, whole; none keeps a job from going on. With CKPT_KILL_POINTS=all, more pairs of operations and moments.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt
from ckpt.engine.retention import prune
from ckpt.reading.step import StepReader
from ckpt.reading.verify import verify_attempt
from ckpt.run import Run
from ckpt.store import placing
from ckpt.testing import handmade
from ckpt.testing.power_cut import Disk, Tree, write_tree
from ckpt.testing.system_calls import Half, Proceed, StorageCall, interposed
from tests.crash.kill_rounds import OPERATIONS, Rounds, is_of_step

ALL = os.environ.get("CKPT_KILL_POINTS") == "all"
_TOKEN_HEX = secrets.token_hex


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, where there is one: images are made and read by the thousand."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckpt-power-cut-", dir=where) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Seen:
    """What a job that starts on an image sees."""

    latest: int | None
    wrong: tuple[str, ...]


class Images:
    """Looks at images of a disk, at each tree once."""

    def __init__(
        self, folder: Path, content: Callable[[str, int], int | None], name: str = "run",
        before: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._folder, self._content, self._name, self._before = folder, content, name, before
        self._seen: dict[frozenset[tuple[str, bytes | None]], Seen] = {}
        self.count = 0

    def look(self, tree: Tree) -> Seen:
        """What is there, and whether a job can go on from it."""
        self.count += 1
        key = frozenset(tree.items())
        if key not in self._seen:
            image = self._folder / f"image-{len(self._seen)}"
            write_tree(tree, image)
            with pytest.MonkeyPatch.context() as patch:  # a process of its own, with random numbers of its own
                patch.setattr("secrets.token_hex", _TOKEN_HEX)
                self._seen[key] = self._look(str(image / self._name))
            shutil.rmtree(image)
        return self._seen[key]

    @property
    def different(self) -> int:
        """How many trees there were."""
        return len(self._seen)

    def _look(self, url: str) -> Seen:
        run, wrong = Run.open(url), []
        try:
            self._before(url)
            survey = run.survey()
            latest = ckpt.latest(url)
        except ckpt.CkptError as error:
            return Seen(None, (f"cannot be opened: {error}",))
        for state in survey.steps:
            if state.commit is not None:  # also one that is not live
                wrong += [str(problem) for problem in verify_attempt(run, state).problems]
            elif state.state != "incomplete":
                wrong.append(state.why)
        if not wrong:
            for state in survey.live:
                content = self._content(url, state.attempt.step)
                if content != state.attempt.step:
                    wrong.append(f"step {state.attempt.step} is of step {content}")
            wrong += self._go_on(url, latest)
        return Seen(latest, tuple(wrong))

    def _go_on(self, url: str, latest: int | None) -> list[str]:
        """Be a job that starts again: it saves the next step, and sweeps."""
        try:
            run = Run.open(url)
            writer = run.open_writer(job="again", world=1, resumed_from=latest).number
            save_by_hand(run, (latest or 0) + 1, writer)
            prune(url, grace_s=0)
            again = ckpt.latest(url)
        except ckpt.CkptError as error:
            return [f"a job cannot go on: {error}"]
        left = [state.attempt.folder for state in run.survey().steps if state.commit is None]
        return [] if again == (latest or 0) + 1 and not left else [f"a job goes on to {again}, and leaves {left}"]


def save_by_hand(run: Run, step: int, writer: int | None = None) -> None:
    """One step, as the keeper writes it, without a keeper."""
    tensors = [
        handmade.HandTensor("model.w", "uint8", (60,), bytes([step]) * 60, group="model"),
        handmade.HandTensor("s", "uint8", (50,), bytes([step]) * 50),
    ]
    handmade.write_step(run, step, tensors, writer=writer, values={"epoch": step})


def content_by_hand(url: str, step: int) -> int | None:
    """The step that all of such a step is of."""
    reader = StepReader.open(Run.open(url), step)
    found = {reader.values()["epoch"]}
    for name, tensor in reader.tensors().items():
        content = bytearray(math.prod(tensor.shape))
        reader.read(name, None, memoryview(content))
        found |= set(content)
    return int(found.pop()) if len(found) == 1 else None


def content_of(url: str, step: int) -> int | None:
    """The same of what the engine wrote."""
    return is_of_step(ckpt.read(url, step=step))


def sweep(disk: Disk, images: Images, when: str, allowed: set[int | None]) -> list[str]:
    """All that is wrong with images of this moment."""
    wrong = []
    for how, tree in disk.images():
        seen = images.look(tree)
        if seen.wrong or seen.latest not in allowed:
            wrong.append(f"{when} ({how}): latest is {seen.latest}, expected one of {allowed}; {seen.wrong}")
    return wrong


# -- one operation of a real job -------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_power_cut_at_every_call(name: str, tmp_path: Path, memory: Path) -> None:
    """The calls of a real trainer and its keeper, or of the command line: cut after each of them."""
    operation = OPERATIONS[name]
    rounds = Rounds(operation, tmp_path / "rounds")
    try:
        disk, events = rounds.trace()
    finally:
        rounds.close()
    name_there = "run-copy" if operation.looked_at == "COPY" else "run"
    # What was damaged before may be damaged still: what counts is that it can be repaired.
    mend = (lambda run: operation.act(run, lambda _: None)) if operation.damaged else (lambda _: None)
    images = Images(memory, content_of, name_there, mend)
    allowed: set[int | None] = {operation.old, operation.new, *operation.between}
    wrong, cuts = [], 0
    for event in events:
        if str(event.point) == "keeper: before send saved":
            wrong += sweep(disk, images, "cut before the save is acknowledged", allowed)
            allowed = {operation.new}
        if event.call is None or not event.call.path.startswith(disk.root):
            continue
        if event.call.name == "fsync":  # what may be found only grows until then: all is seen right before it
            wrong += sweep(disk, images, f"cut before fsync {event.call.path}", allowed)
        disk.apply(event.call)
        cuts += 1
    wrong += sweep(disk, images, "cut at the end", {operation.new})
    print(f"{name}: {cuts} calls, {images.count} images, {images.different} different")  # noqa: T201 - figures for whoever reads the output
    assert not wrong, f"{len(wrong)} of {images.count} images are wrong:\n" + "\n".join(wrong[:8])
    assert cuts > 5


# -- a process is killed, another one goes on from what it sees, then the power goes ----------------


def save_next(url: str) -> None:
    """Go on from the latest step to the next one, and keep only that."""
    run = Run.open(url)
    latest = next((state.attempt.step for state in run.live_steps() if state.commit is not None), None)
    writer = run.open_writer(job="by hand", world=1, resumed_from=latest).number
    save_by_hand(run, (latest or 0) + 1, writer)
    for state in run.survey().live[:-1]:
        run.delete_attempt(state.attempt)


def prune_all_but_one(url: str) -> None:
    prune(url, keep_last=1, grace_s=0)


def roll_back(url: str) -> None:
    """Make the latest step the latest."""
    run = Run.open(url)
    run.rollback(run.find().attempt.step)


class Killed(BaseException):
    """The process is dead: none of its code does anything any more."""


class Process:
    """Does something to a disk until, in place of its call number ``at``, it dies."""

    def __init__(self, disk: Disk, at: int | None = None) -> None:
        self.disk, self.at, self.calls, self.dead = disk, at, 0, False
        # What may be found only grows from one call to the next, until a sync: all is seen right before it.
        self.before_sync: Callable[[StorageCall], None] = lambda _: None

    def run(self, act: Callable[[str], None]) -> None:
        """Do it, to the end or to death. Without times and random numbers: equal images are looked at once."""
        numbers = itertools.count()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.time", lambda: 1_800_000_000.0)
            patch.setattr("secrets.token_hex", lambda nbytes: f"{next(numbers):0{2 * nbytes}x}")
            with interposed(self._around, lambda path: f"{path}/".startswith(f"{self.disk.root}/")):
                try:
                    act(f"{self.disk.root}/run")
                except Killed:
                    assert self.dead

    def _around(self, call: StorageCall, proceed: Proceed, half: Half) -> object:
        if self.dead or self.calls == self.at:
            self.dead = True
            raise Killed
        if call.name == "fsync":
            self.before_sync(call)
        result = proceed()
        self.calls += 1
        self.disk.apply(call)
        return result


# How many steps there are; what is killed; what is done next.
SHORT = [
    (0, save_next, save_next),
    (2, save_next, prune_all_but_one),
    (2, save_next, roll_back),
    (2, prune_all_but_one, prune_all_but_one),
]
LONG = [
    (0, save_next, roll_back),
    (2, save_next, save_next),
    (2, prune_all_but_one, save_next),
    (2, prune_all_but_one, roll_back),
]


@pytest.mark.timeout(600 if ALL else 120)
@pytest.mark.parametrize(("steps", "first", "then"), SHORT + (LONG if ALL else []))
def test_power_cut_after_a_kill(
    steps: int, first: Callable[[str], None], then: Callable[[str], None], memory: Path
) -> None:
    """What the dead had not synced is seen by who comes after: it must not lean on it before it is safe."""
    base = memory / "base"
    base.mkdir()
    for step in range(1, steps + 1):
        save_by_hand(Run.open(base / "run"), step)
    images = Images(memory / "images", content_by_hand)
    wrong: list[str] = []
    kills = moments(first, shutil.copytree(base, memory / "disk"))
    for number in kills:
        root = shutil.copytree(base, memory / f"disk-{number}")
        disk = Disk(root)
        Process(disk, number).run(first)
        seen = ckpt.latest(root / "run")
        if seen is not None or then is save_next:
            new = (seen or 0) + 1 if then is save_next else seen
            wrong += go_on(disk, images, f"killed before call {number}, then", {steps or None, seen, new}, new, then)
        shutil.rmtree(root)
    print(f"{len(kills)} kills, {images.count} images, {images.different} different")  # noqa: T201 - figures for whoever reads the output
    assert not wrong, f"{len(wrong)} of {images.count} images are wrong:\n" + "\n".join(wrong[:8])


def one_save(memory: Path, steps: int) -> tuple[list[str], Images]:
    """What is wrong with any image while a step is saved and older ones are deleted, and after."""
    (memory / "disk").mkdir()
    for step in range(1, steps + 1):
        save_by_hand(Run.open(memory / "disk" / "run"), step)
    images = Images(memory / "images", content_by_hand)
    return go_on(
        Disk(memory / "disk"), images, "", {steps or None, steps + 1}, steps + 1, save_next
    ), images  # fmt: skip


def refuse(*_: object) -> None:
    """A way to place a file that this file system does not know."""
    raise placing._RefusedError


@pytest.mark.parametrize("steps", [0, 2])
def test_power_cut_without_files_without_names(steps: int, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS and Lustre: the same under a dotted name, linked and removed."""
    monkeypatch.setattr(placing, "_by_unnamed", refuse)
    wrong, images = one_save(memory, steps)
    print(f"{images.count} images, {images.different} different")  # noqa: T201 - figures for whoever reads the output
    assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize("steps", [0, 2])
def test_power_cut_without_links(steps: int, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some FUSE and SMB mounts: what is being created may be torn; it is said to be damaged, and is never a step."""
    monkeypatch.setattr(placing, "_by_unnamed", refuse)
    monkeypatch.setattr(placing, "_by_dotted", refuse)
    wrong, images = one_save(memory, steps)
    print(f"{images.count} images, {images.different} different, {len(wrong)} with a torn object")  # noqa: T201 - figures for whoever reads the output
    writer, attempt = ("000001", "w1.1") if not steps else ("000002", "w2.1")
    for found in wrong:
        record = f"cut before fsync {memory}/disk/run/writers/{writer}.json" in found
        commit = f"cut before fsync {memory}/disk/run/step-{steps + 1:08}-{attempt}/COMMIT" in found
        assert (record and "not a readable ckpt record" in found) or (
            commit and "COMMIT: torn or altered" in found and f"latest is {steps or None}," in found
        ), found


def moments(first: Callable[[str], None], root: Path) -> list[int]:
    """At which calls it is killed: before each, in the short form before each sync, and not at all."""
    whole, syncs = Process(Disk(root)), []
    whole.before_sync = lambda _: syncs.append(whole.calls)
    whole.run(first)
    return [*(range(whole.calls) if ALL else syncs), whole.calls]


def go_on(
    disk: Disk, images: Images, when: str, allowed: set[int | None], new: int | None, then: Callable[[str], None]
) -> list[str]:
    """What is wrong with any image while, and after, the next process does its work."""
    wrong: list[str] = []
    process = Process(disk)
    process.before_sync = lambda call: wrong.extend(
        sweep(disk, images, f"{when} cut before fsync {call.path}", allowed)
    )
    process.run(then)
    return wrong + sweep(disk, images, f"{when} cut at the end", {new})
