"""One damage after the other: what verify, load and repair make of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ckpt
from ckpt.cli import main
from ckpt.engine import session
from ckpt.engine.repair import repair
from ckpt.reading.verify import Problem
from ckpt.run import Run
from tests.damage.kinds import Damage, Kind, damages, flip, holds, inflict, load_reads, prepare, target


class Battery:
    """A prepared run of one kind, and copies of it that are damaged."""

    def __init__(self, folder: Path, kind: Kind, *, make: bool = True) -> None:
        self.kind = kind
        self.pristine = folder / "pristine"
        self.folder = folder
        self.count = 0
        self.outcomes: Counter[str] = Counter()
        if make:
            prepare(self.pristine, kind)
            assert ckpt.verify(self.pristine).ok
        self.damages = list(damages(self.pristine))

    def copy(self, *, make: bool = True) -> Path:
        """A fresh copy, under a path of its own: sessions remember what they have read of a run."""
        session._sessions.clear()  # each keeps a thread
        self.count += 1
        work = self.folder / f"run{self.count}"
        if make:
            shutil.rmtree(self.folder / f"run{self.count - 1}", ignore_errors=True)
            shutil.copytree(self.pristine, work)
        return work

    def check(self, damage: Damage) -> None:
        """Everything that must hold of one damage; an AssertionError says what does not."""
        work = self.copy()
        inflict(work, damage)
        named = self.verified(work, damage)
        self.loads(work, damage)
        self.loads(work, damage, tiers=[self.pristine])
        self.two_at_once(work, damage, named)
        self.repaired(work, damage)

    # -- verify ----------------------------------------------------------------------------

    def verified(self, work: Path, damage: Damage) -> list[Problem]:
        """``verify`` fails with an exit code, and names file, tensor and chunk."""
        code, document, said = command("verify", work, "--step", "2", "--json")
        assert code in {3, 4}, (code, said)
        if document is None:  # the step is no longer one: its COMMIT or its writer is gone, or cannot be read
            vanished = damage.key.endswith("/COMMIT") or damage.key.startswith("writers/")
            assert vanished, said
            unnamed = damage.what in {"delete", "folder"}
            assert unnamed or damage.key in said, said
            return []
        (report,) = document["reports"]
        problems = [Problem(**problem) for problem in report["problems"]]
        assert code == 4
        assert damage.key in {problem.file for problem in problems}, problems
        if damage.tensors:
            told = {(p.file, p.tensor, p.chunk) for p in problems}
            assert any((damage.key, tensor, 0) in told for tensor in damage.tensors), problems
        swapped = damage.what.partition(" ")[2]
        allowed = {damage.key, swapped} if damage.what.startswith("swap") else {damage.key}
        assert {problem.file for problem in problems} <= allowed, problems
        return problems

    def two_at_once(self, work: Path, damage: Damage, named: list[Problem]) -> None:
        """A second damage is found beside the first."""
        if not named or damage.key.endswith("/COMMIT"):  # without it nothing says what else there should be
            return
        folder = work / Run.open(self.pristine).find(2).attempt.folder
        second = folder / "metrics.json"
        if "/part-" not in damage.key and not damage.key.startswith("layouts/"):  # which say what data files hold
            group = "model" if "/state-" in damage.key or "/state-" in damage.what else "state"
            (second,) = folder.glob(f"{group}-00000-*")
        before = second.read_bytes()
        flip(second, -1)
        report = ckpt.verify(work, 2)
        assert str(second.relative_to(work)) in {p.file for p in report.problems}, report.problems
        assert damage.key in {p.file for p in report.problems}, report.problems
        second.write_bytes(before)

    # -- load ------------------------------------------------------------------------------

    def loads(self, work: Path, damage: Damage, tiers: Sequence[Path] = ()) -> None:
        """Right bytes or none: of the step, else (of the latest) of the step before."""
        for step in (2, "latest"):
            state = target()
            ended = load_or_error(work, state, step, tiers)
            if isinstance(ended, ckpt.CkptError):
                self.refused(damage, step, tiers, ended)
                assert holds(state) == 0 or "must not be used" in str(ended), ended
                continue
            assert holds(state) == ended.step
            if ended.step == 1:
                self.fell_back(damage, step, tiers, ended)
            elif load_reads(damage):
                assert any(damage.key in text or swapped(damage) in text for text in ended.repaired), ended
                self.outcomes["repaired while loading"] += 1
            else:
                assert ended.repaired == (), ended
                self.outcomes["not read by a load"] += 1

    def refused(self, damage: Damage, step: int | str, tiers: Sequence[Path], error: ckpt.CkptError) -> None:
        """Only what a load meets, that no tier has right, and that no older step stands in for."""
        assert load_reads(damage), error
        writers = damage.key.startswith("writers/")  # nothing says which step is live
        assert writers or (step == 2 and not tiers), error
        unnamed = damage.what in {"delete", "folder"}
        assert unnamed or damage.key in str(error) or swapped(damage) in str(error), error
        self.outcomes["refused"] += 1

    def fell_back(self, damage: Damage, step: int | str, tiers: Sequence[Path], report: ckpt.LoadReport) -> None:
        """To the step before, and says why: but for a step that is no step any more."""
        assert step == "latest", report
        assert load_reads(damage), report
        assert not tiers or damage.key.startswith("writers/"), report
        vanished = damage.key.endswith(("/COMMIT", "2.json")) and damage.what in {"delete", "folder"}
        told = any(damage.key in skip.why or swapped(damage) in skip.why for skip in report.skipped)
        assert vanished or told, report
        self.outcomes["fell back"] += 1

    # -- repair ----------------------------------------------------------------------------

    def repaired(self, work: Path, damage: Damage) -> None:
        """What can be is put right to the byte: from parity where that reaches, else from a copy of the run."""
        step: list[object] = ["--step", "2"]
        before = snapshot(work)
        dry = repair(work, step=2, sources=[self.pristine], dry_run=True)
        assert dry.ok, dry
        assert snapshot(work) == before
        if not self.from_within(damage):
            assert {damage.key, swapped(damage)} & left_by_repair(work, damage)
            step += ["--from", self.pristine]
        code, document, said = command("repair", work, *step, "--json")
        assert code == 0, (document, said)
        assert document["ok"]
        assert same_files(self.pristine, work)
        assert ckpt.verify(work, 2).ok
        self.outcomes["repaired on storage"] += 1

    def from_within(self, damage: Damage) -> bool:
        """Whether the step itself has what is needed."""
        name = damage.key.rpartition("/")[2]
        if name.endswith((".safetensors", ".pack")):
            if damage.what.startswith("swap"):  # two members of one parity are gone
                return False
            in_header = damage.what.startswith("flip") and not damage.tensors  # which the layout makes
            return self.kind.parity or damage.what == "append" or in_header
        return name == "model.safetensors.index.json" or name.startswith("parity-")


def load_or_error(
    work: Path, state: dict[str, Any], step: int | str, tiers: Sequence[Path]
) -> ckpt.LoadReport | ckpt.CkptError:
    """What a load gave, or raised."""
    try:
        return ckpt.load(work, state, step=step, tiers=tiers)
    except ckpt.CkptError as error:
        return error


def left_by_repair(work: Path, damage: Damage) -> set[str]:
    """The files that a repair without a source leaves; the damaged one where there is no step to repair any more."""
    no_step = damage.key.endswith("/COMMIT") or damage.key.startswith("writers/")
    try:
        return {problem.file for one in repair(work, step=2).steps for problem in one.left}
    except ckpt.CkptError:
        if not no_step:
            raise
        return {damage.key}


def swapped(damage: Damage) -> str:
    """The other file of a swap; else the file itself."""
    return damage.what.partition(" ")[2] if damage.what.startswith("swap") else damage.key


def command(*words: object) -> tuple[int, Any, str]:
    """(exit code, JSON document or None, stderr) of one ``ckpt`` command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, json.loads(out.getvalue()) if out.getvalue() else None, err.getvalue()


def snapshot(root: Path) -> dict[str, bytes | str]:
    """Every file of a run with its bytes."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        key = str(path.relative_to(root))
        found[key] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


def same_files(a: Path, b: Path) -> bool:
    """Whether two runs have the same files with the same bytes, and no more."""
    return snapshot(a) == snapshot(b)


def run_battery(
    folder: Path, kind: Kind, chosen: Callable[[int], bool] = lambda _: True
) -> tuple[int, int, Counter[str]]:
    """(damages that went as they must, damages, what became of them); the first that did not is raised."""
    battery = Battery(folder, kind)
    todo = [damage for place, damage in enumerate(battery.damages) if chosen(place)]
    for damage in todo:
        try:
            battery.check(damage)
        except Exception as error:
            raise AssertionError(f"{kind}: {damage.what} of {damage.key}: {type(error).__name__}: {error}") from error
    return len(todo), len(battery.damages), battery.outcomes
