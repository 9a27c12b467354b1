"""What saving in the background takes from a training that goes on: its steps' time, CPU, memory.

Run from the project's root::

    torchrun --nproc-per-node 2 benchmarks/train_with_saves.py                  # 1.5 GB, 5 pairs
    torchrun --nproc-per-node 2 benchmarks/train_with_saves.py --quick --check  # 0.4 GB, 3 pairs, under 50 s

The job is that of ``workload.py``. First ckpt alone: some saves between training steps, and how much resident
memory the trainer and the keeper have then besides the arenas. Then by turns ckpt, ckpt with ``overlap=True`` (whose
copy runs beside the next step) and DCP's ``async_save`` in a thread: two training steps with nothing else going on, a
save, training steps until it is durable on all ranks. --quick makes one such step, and no saves with overlap.

step while saving    mean of the steps that began while the save was being persisted, the last of them only partly
                     beside it; against the mean of the two steps just before the save. The stall is not in it
added                seconds that training lost by the save: its stall, and what the steps beside it took longer
slowed               1 + the seconds that those steps took longer / the seconds that the save was being persisted:
                     how much slower training is while the disk works, however long a step takes
CPU per GB           of what persists: the keeper process (both ranks' bytes); the threads of DCP's executor (all
                     ranks'). Staging, on the training's own thread and in the stall, is printed beside both
memory               the keeper's private memory (heap, stacks, pages of files; arenas are shared memory) and what
                     the trainer of the greater rank has more of it than before ckpt was first used; the most of all
                     readings
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import torch.distributed as dist
from peers_dcp import Dcp
from pictures import plot_bars
from processes import cpu_s, give_back_heap, keeper_pid, private_nbytes
from ranks import Seconds, begin, of_all, on_rank_0, remove, settle, workplace
from report import Figure, finish, machine, options
from torch.distributed.device_mesh import init_device_mesh
from workload import SIZES, Job, Size, parse

import ckpt

SIDES = ("ckpt", "ckpt overlap", "dcp")
MEMORY_SAVES = 4  # two of them fill arenas for the first time
MEMORY_NBYTES = 128 << 20

Row = tuple[str, str, float | None, str]  # figure, against, the largest ratio, unit

ROWS: tuple[Row, ...] = (
    ("ckpt step while saving", "ckpt step without", 1.1, "s"),
    ("dcp step while saving", "dcp step without", None, "s"),
    ("ckpt added", "dcp added", None, "s"),
    ("ckpt overlap added", "dcp added", None, "s"),
    ("ckpt slowed", "dcp slowed", None, "x"),
    ("ckpt keeper CPU per GB", "dcp thread CPU per GB", 0.25, "s"),
    ("ckpt staging CPU per GB", "dcp staging CPU per GB", None, "s"),
    ("ckpt persisted in", "dcp persisted in", None, "s"),
)


class Background:
    """A save that goes on beside training: whether it has ended, and when."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.began = time.perf_counter()
        self.seconds = 0.0
        self._error: BaseException | None = None
        self._wait = wait
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended. Raises what made it fail."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:  # noqa: BLE001 - the training's thread raises it
            self._error = error
        self.seconds = time.perf_counter() - self.began


class Training:
    """The job and its saves."""

    def __init__(self, folder: Path, size: Size, *, quick: bool) -> None:
        self.quick = quick
        self.job = Job(size, init_device_mesh("cpu", (dist.get_world_size(),)), seed=1)
        self.gigabytes = self.job.unique_nbytes() / 1e9
        self.folder = folder
        self.saved = 0
        self.dcp = Dcp(self.job, self.job)

    def step_s(self) -> float:
        """Seconds of a training step, of the slower rank."""
        dist.barrier()
        started = time.perf_counter()
        self.job.train_step()
        return max(of_all(time.perf_counter() - started))

    def start_ckpt(self, *, overlap: bool = False) -> Callable[[], object]:
        """Save by ckpt; what waits for its end."""
        self.saved += 1
        return ckpt.save(self.folder / "ckpt", self.saved, self.job.state, overlap=overlap).result

    def start_dcp(self) -> Callable[[], object]:
        """Save by DCP; what waits for its end."""
        return self.dcp.save_in_thread(self.folder / "dcp")

    def memory(self) -> Seconds:
        """Bytes beyond the arenas, from the first save on; call it before anything else saves."""
        self.step_s()
        give_back_heap()
        before = private_nbytes()
        keeper: list[int] = []
        trainer: list[int] = []
        for _ in range(MEMORY_SAVES):
            wait = self.start_ckpt()
            for look in (self.step_s, wait):
                look()
                give_back_heap()
                trainer.append(private_nbytes() - before)
                keeper.append(private_nbytes(keeper_pid()))
        of_keeper, of_trainer = max(of_all(max(keeper))), max(0.0, *of_all(max(trainer)))
        return {
            "memory beyond the arenas": of_keeper + of_trainer,
            "keeper's memory": of_keeper,
            "trainer's memory": of_trainer,
        }

    def side(self, name: str, start: Callable[[], Callable[[], object]], used_cpu_s: Callable[[], float]) -> Seconds:
        """Steps without, a save, steps beside it; ``used_cpu_s`` reads what has persisted, so far, on this rank."""
        settle()
        without = [self.step_s() for _ in range(1 if self.quick else 2)]
        cpu_before = used_cpu_s()
        dist.barrier()
        started, own = time.perf_counter(), time.thread_time()
        wait = start()
        staging = time.thread_time() - own
        stall = max(of_all(time.perf_counter() - started))
        save = Background(wait)
        beside = []
        while not all(of_all(save.done)):
            beside.append(self.step_s())
        dist.barrier()
        persisted = max(of_all(save.seconds))
        longer = sum(beside) - len(beside) * fmean(without)
        on_rank_0(lambda: remove([self.folder / "dcp", *self.folder.glob(f"ckpt/step-{self.saved - 1:08d}-*")]))
        return {
            f"{name} step without": fmean(without),
            f"{name} step while saving": fmean(beside) if beside else fmean(without),
            f"{name} added": stall + longer,
            f"{name} slowed": 1 + longer / persisted,
            f"{name} persisted in": persisted,
            f"{name} stall": stall,
            f"{name} CPU": sum(of_all(used_cpu_s() - cpu_before)) / self.gigabytes,
            f"{name} staging CPU per GB": sum(of_all(staging)) / self.gigabytes,
        }

    def pair(self, number: int) -> Seconds:
        """All sides, in an order that alternates."""

        def keeper_cpu_s() -> float:
            return cpu_s(keeper_pid()) if dist.get_rank() == 0 else 0.0  # one works for all ranks: counted once

        sides: list[Callable[[], Seconds]] = [
            lambda: self.side("ckpt", self.start_ckpt, keeper_cpu_s),
            lambda: self.side("dcp", self.start_dcp, lambda: self.dcp.thread_cpu_s),
        ]
        if not self.quick:
            sides.append(lambda: self.side("ckpt overlap", lambda: self.start_ckpt(overlap=True), keeper_cpu_s))
        if number % 2:
            sides.reverse()
        found: Seconds = {}
        for side in sides:
            found |= side()
        found["dcp thread CPU per GB"] = found.pop("dcp CPU")
        for name in ("ckpt", "ckpt overlap"):
            if f"{name} CPU" in found:
                found[f"{name} keeper CPU per GB"] = found.pop(f"{name} CPU")
        return found


def figures(nbytes: int, memory: Seconds, pairs: list[Seconds]) -> list[Figure]:
    """Medians of the pairs, and of their ratios; the memory."""
    taken: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        for name, value in pair.items():
            taken[name].append(value)
    found = [Figure("state", nbytes, "bytes")]
    for name, against, bound, unit in ROWS:
        if name not in taken:
            continue  # left out by --quick
        ratio = median(a / b for a, b in zip(taken[name], taken[against], strict=True))
        found.append(Figure(name, median(taken[name]), unit, against, ratio, bound))
    for name, value in memory.items():
        found.append(Figure(name, value, "bytes", bound=MEMORY_NBYTES if name.startswith("memory") else None))
    shown = {figure.name for figure in found}
    rest = [name for name in taken if name not in shown]
    return found + [Figure(name, median(taken[name]), "x" if name.endswith("slowed") else "s") for name in rest]


def picture(path: Path, title: str, found: list[Figure]) -> None:
    """Bars: what training loses, and what persisting costs."""
    value = {figure.name: figure.value for figure in found}

    def of_sides(suffix: str) -> dict[str, float]:
        return {side: value[f"{side} {suffix}"] for side in SIDES if f"{side} {suffix}" in value}

    quiet = of_sides("step without")
    groups = {
        "one training step (seconds)": {"none saved": fmean(quiet.values()), **of_sides("step while saving")},
        "added to training by one save (seconds)": of_sides("added"),
        "CPU for each GB persisted (seconds)": {
            "ckpt keeper": value["ckpt keeper CPU per GB"],
            "ckpt staging": value["ckpt staging CPU per GB"],
            "dcp thread": value["dcp thread CPU per GB"],
            "dcp staging": value["dcp staging CPU per GB"],
        },
        "memory beyond the arenas (MiB)": {
            "ckpt keeper": value["keeper's memory"] / 2**20,
            "ckpt trainer": value["trainer's memory"] / 2**20,
        },
    }
    plot_bars(path, title, groups)


def arguments() -> argparse.Namespace:
    """The command line."""
    args = parse(options(__doc__))
    args.pairs = args.pairs or (3 if args.quick else 5)
    return args


def measure(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """The memory, then all pairs; what they come to."""
    training = Training(folder, SIZES[args.size], quick=args.quick)
    memory = training.memory()
    training.start_dcp()()  # not counted: it touches its staging memory for the first time
    pairs = []
    for number in range(1, args.pairs + 1):
        pairs.append(training.pair(number))
        if dist.get_rank() == 0:
            told = ", ".join(f"{name} {value:.3g}" for name, value in pairs[-1].items())
            print(f"pair {number} of {args.pairs}: {told}", flush=True)
    training.dcp.close()
    return figures(training.job.unique_nbytes(), memory, pairs)


def main() -> int:
    """Measure, report; the exit code."""
    args = arguments()
    first = begin()
    with workplace(args.dir, "train_with_saves") as folder:
        where = machine(folder)
        found = measure(args, folder)
    world = dist.get_world_size()
    dist.destroy_process_group()
    if not first:
        return 0
    title = f"training while {found[0].value / 1e9:.2f} GB are saved, {world} ranks, medians of {args.pairs} pairs"
    return finish(args, title, where, found, lambda path, title: picture(path, title, found))


if __name__ == "__main__":
    sys.exit(main())
