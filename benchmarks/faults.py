"""What becomes of a checkpoint when something breaks: the same faults on ckpt and on its peers.

Run alone: ``python benchmarks/faults.py --against dcp,torchsnapshot,torch``. Each fault is done to a job of two gloo
ranks that saves 64 MB a rank; then a fresh job of two ranks restarts from the newest checkpoint, and what it gets is
compared element by element with what was saved. Verdicts are computed from that, never written down by hand:

* survived: the restart has one whole state, the newest that it may have;
* refused clearly: an error that names the file, the tensor or the step (``obscurely``: an error that does not);
* lost: an older state although a newer save had been reported as done, or a failed save that nobody was told of;
* mixed: a state of several steps; silently wrong: values that nobody saved in that place; ran code: a checkpoint's own;
* hung: nothing for 45 s (a save) or 90 s (a restart).

The peers know no run of steps; what they are given here is a folder for every step, and the careful restart that
``fault_systems.py`` describes.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from fault_jobs import (
    HANG_S,
    LOAD_S,
    SAVE_S,
    Job,
    Outcome,
    load_newest,
    save_all,
    save_and_go_on,
    save_in_background,
)
from fault_systems import SYSTEMS, TENSORS, WORLD, Bomb, filled
from pictures import plot_verdicts
from report import Figure, broken, machine, options, show, write_json
from rich.console import Console
from rich.table import Table

SURVIVED, CLEAR, OBSCURE = "survived", "refused clearly", "refused obscurely"
LOST, MIXED, WRONG, CODE, HUNG = "lost", "mixed", "silently wrong", "ran code", "hung"
VERDICTS = (SURVIVED, CLEAR, OBSCURE, LOST, MIXED, WRONG, CODE, HUNG)
NEVER = (LOST, MIXED, WRONG, CODE, HUNG)  # what ckpt must not do
STYLES = {SURVIVED: "green", CLEAR: "cyan", OBSCURE: "yellow"}


class Verdict(NamedTuple):
    """What became of one fault in one system."""

    verdict: str
    detail: str


class Bench(NamedTuple):
    """One system's place for one fault."""

    system: str
    root: Path
    numel: int  # of each tensor of a rank

    @property
    def nbytes(self) -> int:
        """Of one save, all ranks together."""
        return WORLD * TENSORS * self.numel * 4

    def save(self, *names: tuple[str, int]) -> None:
        """Saves that must work."""
        outcomes = Job(save_all, self.system, self.root, list(names), self.numel).results(SAVE_S)
        if any(outcome.how != "returned" for outcome in outcomes):
            raise RuntimeError(f"{self.system}: a plain save failed: {outcomes}")

    def folder(self, step: int) -> Path:
        """The newest folder of a step."""
        found = [path for path in self.root.iterdir() if re.match(rf"step-0*{step}(-|$)", path.name)]
        return max(found)

    def restart(self, acceptable: Collection[int], names: Collection[str] = ()) -> Verdict:
        """Load the newest in a fresh job; ``names`` are files whose mention makes an error a clear one."""
        return judge(Job(load_newest, self.system, self.root, self.numel).results(LOAD_S), acceptable, names)


def judge(outcomes: Sequence[Outcome], acceptable: Collection[int], names: Collection[str]) -> Verdict:
    """The verdict on what a restart's ranks have got."""
    if any(outcome.how == "hung" for outcome in outcomes):
        return Verdict(HUNG, "; ".join(str(outcome.what)[:120] for outcome in outcomes))
    errors = [str(outcome.what) for outcome in outcomes if outcome.how != "returned"]
    if errors:
        told = " ".join(errors[0].split())
        clear = any(name in error for name in names for error in errors)
        clear = clear or any(re.search(r"\blayer\d|\bstep[- ]\d|\brank[- ]\d", error) for error in errors)
        return Verdict(CLEAR if clear else OBSCURE, told[:300])
    steps: set[int] = set()
    for rank, outcome in enumerate(outcomes):
        for values in outcome.what:
            for value in values:
                step = round((value - rank) / 10) if abs(value) < 1e6 else -1  # false for NaN too
                if value != filled(step, rank):
                    return Verdict(WRONG, f"rank {rank} has {value!r}, which it never saved")
                steps.add(step)
    if len(steps) > 1:
        return Verdict(MIXED, f"tensors of the steps {sorted(steps)}")
    (step,) = steps
    if step not in acceptable:
        return Verdict(LOST, f"went back to step {step}")
    return Verdict(SURVIVED, f"step {step}, whole")


# -- damage to a checkpoint that was complete ------------------------------------------------


def largest(folder: Path) -> list[Path]:
    """Its files, the largest first (of one size: by name)."""
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (-path.stat().st_size, path))


def data_file(folder: Path, rank: int) -> Path:
    """The file that has most of a rank's bytes; parity is not one."""
    shards = [path for path in largest(folder) if path.suffix != ".xor"]
    return sorted(shards[:WORLD])[rank] if shards[0].parent == shards[1].parent else shards[rank]


def flip_bit(bench: Bench) -> list[str]:
    """One bit of rank 0's payload."""
    path = data_file(bench.folder(2), 0)
    with path.open("r+b") as file:
        file.seek(int(0.45 * path.stat().st_size))  # in a tensor, whatever lies between them
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
    return [path.name]


def cut(bench: Bench) -> list[str]:
    """The second half of rank 0's file is gone."""
    path = data_file(bench.folder(2), 0)
    os.truncate(path, path.stat().st_size // 2)
    return [path.name]


def remove(bench: Bench) -> list[str]:
    """Rank 1's file is gone."""
    path = data_file(bench.folder(2), 1)
    path.unlink()
    return [path.name]


def swap(bench: Bench) -> list[str]:
    """Each rank has the other one's file."""
    one, other = (data_file(bench.folder(2), rank) for rank in range(WORLD))
    between = one.with_name("between")
    for source, target in ((one, between), (other, one), (between, other)):
        source.rename(target)
    return [one.name, other.name]


def older_shard(bench: Bench) -> list[str]:
    """Rank 0's file is that of step 1."""
    path = data_file(bench.folder(2), 0)
    shutil.copyfile(data_file(bench.folder(1), 0), path)
    return [path.name]


def damaged(damage: Callable[[Bench], list[str]]) -> Callable[[Bench], Verdict]:
    """Steps 1 and 2 are saved, then step 2 is damaged. Step 1 will do, where the system itself goes back to it."""

    def fault(bench: Bench) -> Verdict:
        bench.save(("step-1", 1), ("step-2", 2))
        return bench.restart({1, 2}, damage(bench))

    return fault


def pickled_code(bench: Bench) -> Verdict:
    """A pickle that makes a folder, in place of whatever says what lies where."""
    bench.save(("step-1", 1), ("step-2", 2))
    marker = bench.root.parent / "marker"
    names = []
    for pattern in SYSTEMS[bench.system].metadata:
        for path in bench.folder(2).glob(pattern):
            path.write_bytes(pickle.dumps(Bomb(marker)))
            names.append(path.name)
    verdict = bench.restart({1, 2}, names)
    return Verdict(CODE, "the folder that it makes was there after the restart") if marker.exists() else verdict


# -- trouble during a save -------------------------------------------------------------------


def keeper_pids(job: Job) -> list[int]:
    """The keepers of a job of ckpt; none for others."""
    from ckpt.keeper.client import statuses

    return [status.pid for status in statuses() if job.name in status.job]


def wait_for_bytes(bench: Bench, since_ns: int, nbytes: float) -> bool:
    """Wait until files written since then have so many bytes; False when none of it came."""
    deadline = time.monotonic() + SAVE_S
    while time.monotonic() < deadline:
        written = 0
        for path in bench.root.rglob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if stat.st_mtime_ns >= since_ns and path.is_file():
                written += stat.st_size
        if written >= nbytes:
            return True
        time.sleep(0.001)
    return False


def killed(name: str, ranks: Sequence[int]) -> Callable[[Bench], Verdict]:
    """Step 1 is saved; step 2 is being saved under ``name`` when SIGKILL comes, for no ranks: to every process."""

    def fault(bench: Bench) -> Verdict:
        bench.save(("step-1", 1))
        since_ns = time.time_ns()
        job = Job(save_all, bench.system, bench.root, [(name, 2)], bench.numel)
        if not wait_for_bytes(bench, since_ns, 0.25 * bench.nbytes):
            return Verdict(HUNG, "the save wrote nothing")
        pids = [] if ranks else keeper_pids(job)
        job.signal(signal.SIGKILL, *ranks)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        survivors = [outcome for outcome in job.results(HANG_S) if outcome.how == "hung"]
        if survivors:
            return Verdict(HUNG, "the other rank does not come back from its save")
        return bench.restart({1, 2})

    return fault


def stopped(bench: Bench) -> Verdict:
    """A rank is stopped in the middle of a save; the other one must not wait for ever."""
    bench.save(("step-1", 1))
    since_ns = time.time_ns()
    job = Job(save_all, bench.system, bench.root, [("step-2", 2)], bench.numel)
    wait_for_bytes(bench, since_ns, 0.05 * bench.nbytes)
    job.signal(signal.SIGSTOP, 1)
    other = job.results(HANG_S)[0]
    if other.how == "hung":
        return Verdict(HUNG, f"the other rank waits for it: {other.what}")
    return bench.restart({1, 2})


def full(bench: Bench) -> Verdict:
    """No file may grow beyond a quarter of what a rank writes."""
    bench.save(("step-1", 1))
    limit = bench.nbytes // WORLD // 4
    job = Job(save_all, bench.system, bench.root, [("step-2", 2)], bench.numel, file_limit_nbytes=limit)
    outcomes = job.results(HANG_S)
    if any(outcome.how == "hung" for outcome in outcomes):
        return Verdict(HUNG, "the save does not come back")
    if all(outcome.how == "returned" for outcome in outcomes):
        return Verdict(LOST, "the save returned as if all were well")
    return bench.restart({1})


def full_unseen(bench: Bench) -> Verdict:
    """The same in the background, by a script that never looks; it, or somebody, must say something."""
    bench.save(("step-1", 1))
    limit = bench.nbytes // WORLD // 4
    names = [("step-2", 2), ("step-3", 3)]
    job = Job(save_and_go_on, bench.system, bench.root, names, bench.numel, file_limit_nbytes=limit)
    outcomes = job.results(HANG_S)
    if any(outcome.how == "hung" for outcome in outcomes):
        return Verdict(HUNG, "the script does not end")
    silent = all(o.how == "returned" and "rror" not in o.said and "too large" not in o.said for o in outcomes)
    silent = silent and all("file may not grow" not in outcome.said for outcome in outcomes)
    return Verdict(LOST, "the script ended well, and nobody was told") if silent else bench.restart({1})


def in_background(then: str) -> Callable[[Bench], Verdict]:
    """An asynchronous save of step 2, and then what a training script does next."""

    def fault(bench: Bench) -> Verdict:
        bench.save(("step-1", 1))
        outcomes = Job(save_in_background, bench.system, bench.root, "step-2", 2, bench.numel, then).results(HANG_S)
        if any(outcome.how == "hung" for outcome in outcomes):
            return Verdict(HUNG, "training does not go on")
        if then != "leave" and any(outcome.how != "returned" for outcome in outcomes):
            told = next(str(outcome.what) for outcome in outcomes if outcome.how != "returned")
            return Verdict(OBSCURE, f"training fails: {told[:200]}")
        return bench.restart({2})

    return fault


def two_jobs(bench: Bench) -> Verdict:
    """Two jobs save steps 1 to 3 into one place at the same time, the second with values of its own."""
    bench.root.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(save_all, bench.system, bench.root, [(f"step-{i}", i + other) for i in (1, 2, 3)], bench.numel)
        for other in (0, 100)
    ]
    for job in jobs:
        if any(outcome.how == "hung" for outcome in job.results(SAVE_S)):
            return Verdict(HUNG, "a job does not end")
    return bench.restart({1, 2, 3, 101, 102, 103})


FAULTS: dict[str, Callable[[Bench], Verdict]] = {
    "one bit flipped": damaged(flip_bit),
    "a shard cut in half": damaged(cut),
    "a shard missing": damaged(remove),
    "two shards swapped": damaged(swap),
    "a shard of the step before": damaged(older_shard),
    "a pickle as metadata": pickled_code,
    "all killed mid-save": killed("step-2", ()),
    "a rank killed mid-save": killed("step-2", (1,)),
    "all killed, saving again": killed("step-1", ()),
    "a rank killed, saving again": killed("step-1", (1,)),
    "a rank stopped mid-save": stopped,
    "disk full": full,
    "disk full, asynchronous": full_unseen,
    "state changed after save": in_background("change"),
    "collectives beside a save": in_background("train"),
    "script ends after save": in_background("leave"),
    "two jobs in one place": two_jobs,
}
QUICK = ("one bit flipped", "a shard missing", "all killed, saving again", "state changed after save")


def main() -> int:
    """Break things, and report; the exit code."""
    parser = options(__doc__, pairs=False)
    parser.add_argument("--against", default="dcp,torchsnapshot,torch", help="peers (default: %(default)s)")
    parser.add_argument("--only", help="faults whose name contains this")
    parser.add_argument("--mb", type=float, default=64, help="MB a rank saves (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to save to")
    args = parser.parse_args()
    systems = ["ckpt", "ckpt+parity", *(name for name in args.against.split(",") if name)]
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        parser.error(f"unknown system {', '.join(unknown)}; known: {', '.join(SYSTEMS)}")
    faults = [name for name in (QUICK if args.quick else FAULTS) if not args.only or args.only in name]
    numel = int((args.mb if not args.quick else min(args.mb, 16)) * 1e6 / 4 / TENSORS)
    found: dict[tuple[str, str], Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="faults-", dir=args.dir) as folder:
        where = machine(Path(folder))
        for fault in faults:
            for system in systems:
                place = Path(folder) / "place"
                found[fault, system] = FAULTS[fault](Bench(system, place / "root", numel))
                shutil.rmtree(place, ignore_errors=True)
                print(f"{fault}: {SYSTEMS[system].label}: {': '.join(found[fault, system])}", flush=True)
    figures = count(found, systems)
    title = f"{len(faults)} faults, a restart of 2 ranks after each"
    table(found, faults, systems)
    show(title, where, figures)
    if args.json:
        write_json(args.json, where, figures)
        record = json.loads(args.json.read_text())
        record["verdicts"] = [
            {"fault": fault, "system": SYSTEMS[system].label, "verdict": verdict, "detail": detail}
            for (fault, system), (verdict, detail) in found.items()
        ]
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        rows = {f: {SYSTEMS[s].label: found[f, s].verdict for s in systems} for f in faults}
        plot_verdicts(args.plot, f"{title}\n{where}", rows, VERDICTS)
    for sentence in broken(figures):
        print(f"broken bound: {sentence}", file=sys.stderr)
    return int(args.check and bool(broken(figures)))


def count(found: dict[tuple[str, str], Verdict], systems: Sequence[str]) -> list[Figure]:
    """How often each system came to each verdict; what ckpt must never do has the bound 0."""
    figures = []
    for system in systems:
        counts = Counter(verdict.verdict for (_, name), verdict in found.items() if name == system)
        for verdict in VERDICTS:
            bound = 0.0 if system.startswith("ckpt") and verdict in NEVER else None
            figures.append(Figure(f"{SYSTEMS[system].label}: {verdict}", counts[verdict], "faults", bound=bound))
    return figures


def table(found: dict[tuple[str, str], Verdict], faults: Sequence[str], systems: Sequence[str]) -> None:
    """The verdicts for people."""
    console = Console()
    drawn = Table(title="what became of each fault", title_justify="left")
    drawn.add_column("fault")
    for system in systems:
        drawn.add_column(SYSTEMS[system].label)
    for fault in faults:
        cells = [found[fault, system].verdict for system in systems]
        drawn.add_row(fault, *(f"[{STYLES.get(cell, 'bold red')}]{cell}[/]" for cell in cells))
    (console if console.is_terminal else Console(width=120)).print(drawn)


if __name__ == "__main__":
    sys.exit(main())
