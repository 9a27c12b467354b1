"""How long saves stall a training that goes on: the distribution over many saves, not only the middle.

Run from the project's root::

    torchrun --nproc-per-node 2 benchmarks/stall.py                    # 50 saves of 1.5 GB of each kind
    torchrun --nproc-per-node 2 benchmarks/stall.py --saves 20         # the same in less time
    torchrun --nproc-per-node 2 benchmarks/stall.py --quick --check    # 0.4 GB, 4 saves, no process, under 50 s

The job is that of ``workload.py``. Each kind of save in turn (in an order that rotates) is made between two real
training steps: save, ``--steps`` steps of forward, backward and optimizer, wait until it is durable (not counted),
next kind. Two saves of each kind are made before counting begins. A stall is that of the slower rank; ratios are of
saves in the same round.

ckpt          ``ckpt.save``: the time until it returns
ckpt overlap  ``ckpt.save(..., overlap=True)``: the same, and the wait in the next optimizer step's pre-hook
dcp async     DCP's ``async_save`` in a thread: the time until it returns (its walk over the state included)
dcp process   the same in a process; made in every fifth round only
floor copy    the same bytes copied into memory touched before, tensor by tensor
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import floors
import torch.distributed as dist
from peers_dcp import Dcp
from pictures import percentile, plot_spread
from ranks import begin, of_all, on_rank_0, remove, workplace
from report import Figure, finish, machine, options
from torch.distributed.device_mesh import init_device_mesh
from workload import SIZES, Job, Size, parse

import ckpt

WARMUPS = 2
PROCESS_EVERY = 5  # it takes longest, and is in no bound

Samples = dict[str, dict[int, float]]  # kind -> round -> seconds


class Stalls:
    """The job, and a method for each kind of save."""

    def __init__(self, folder: Path, size: Size, steps: int, *, quick: bool) -> None:
        self.job = Job(size, init_device_mesh("cpu", (dist.get_world_size(),)), seed=1)
        self.steps = steps
        self.folder = folder
        self.buffer = floors.Buffer(self.job.needed_nbytes())
        self.dcp = Dcp(self.job, self.job)
        self.saved = 0
        self.kinds: dict[str, Callable[[], float]] = {
            "ckpt": lambda: self.ckpt(overlap=False),
            "ckpt overlap": lambda: self.ckpt(overlap=True),
            "dcp async": lambda: self.peer(self.dcp.save_in_thread),
            "dcp process": lambda: self.peer(self.dcp.save_in_process),
            "floor copy": lambda: floors.copy_s(self.job.tensors(), self.buffer),
        }
        if quick:
            del self.kinds["dcp process"]

    def measure(self, kind: str) -> float:
        """One save of a kind with the training after it; its stall on the slower rank."""
        dist.barrier()
        return max(of_all(self.kinds[kind]()))

    def ckpt(self, *, overlap: bool) -> float:
        """A save by ckpt, as the next step of its run."""
        self.saved += 1
        started = time.perf_counter()
        pending = ckpt.save(self.folder / "ckpt", self.saved, self.job.state, overlap=overlap)
        stall = time.perf_counter() - started - pending.stall_s
        self.train()
        stall += pending.stall_s  # with what the optimizer's step has waited meanwhile
        pending.result()
        on_rank_0(lambda: remove((self.folder / "ckpt").glob(f"step-{self.saved - 1:08d}-*")))
        return stall

    def peer(self, save: Callable[[Path], Callable[[], object]]) -> float:
        """A save by DCP."""
        place = self.folder / "dcp"
        started = time.perf_counter()
        wait = save(place)
        stall = time.perf_counter() - started
        self.train()
        wait()
        on_rank_0(lambda: remove([place]))
        return stall

    def train(self) -> None:
        """The steps between two saves."""
        for _ in range(self.steps):
            self.job.train_step()


def figures(nbytes: int, samples: Samples) -> list[Figure]:
    """Median, 99th percentile and longest stall of each kind; the medians compared."""

    def compared(kind: str, other: str, bound: float | None) -> Figure:
        ratio = median(samples[kind][n] / samples[other][n] for n in samples[kind] if n in samples[other])
        middle = percentile(list(samples[kind].values()), 50)
        return Figure(f"{kind} stall, p50", middle, "s", f"{other} stall, p50", ratio, bound)

    found = [
        Figure("state", nbytes, "bytes"),
        compared("ckpt overlap", "dcp async", 0.05),
        compared("ckpt", "dcp async", None),
        compared("ckpt", "floor copy", None),
    ]
    for kind, stalls in samples.items():
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100)):
            if (kind, name) not in {("ckpt", "p50"), ("ckpt overlap", "p50")}:
                found.append(Figure(f"{kind} stall, {name}", percentile(list(stalls.values()), percent), "s"))
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__, pairs=False)
    parser.add_argument("--saves", type=int, help="saves of each kind (default 50; with --quick 4)")
    parser.add_argument("--steps", type=int, default=1, help="training steps between saves (default 1)")
    args = parse(parser)
    args.saves = args.saves or (4 if args.quick else 50)
    return args


def measure(args: argparse.Namespace, folder: Path) -> tuple[int, Samples]:
    """(bytes of the state, all samples)."""
    bench = Stalls(folder, SIZES[args.size], args.steps, quick=args.quick)
    samples: Samples = {kind: {} for kind in bench.kinds}
    for number in range(1 - WARMUPS, args.saves + 1):
        kinds = list(bench.kinds)
        kinds = kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
        for kind in kinds:
            if kind == "dcp process" and number > 0 and (number - 1) % PROCESS_EVERY:
                continue
            seconds = bench.measure(kind)
            if number > 0:
                samples[kind][number] = seconds
        if number > 0 and dist.get_rank() == 0:
            told = ", ".join(f"{kind} {stalls[number]:.3f}" for kind, stalls in samples.items() if number in stalls)
            print(f"save {number} of {args.saves} (s): {told}", flush=True)
    bench.dcp.close()
    return bench.job.unique_nbytes(), samples


def main() -> int:
    """Measure, report; the exit code."""
    args = arguments()
    first = begin()
    with workplace(args.dir, "stall") as folder:
        where = machine(folder)
        nbytes, samples = measure(args, folder)
    world = dist.get_world_size()
    dist.destroy_process_group()
    if not first:
        return 0
    title = f"stall of training by {args.saves} saves of {nbytes / 1e9:.2f} GB each, {world} ranks"
    seconds = {kind: list(stalls.values()) for kind, stalls in samples.items()}
    return finish(
        args, title, where, figures(nbytes, samples), lambda path, title: plot_spread(path, title, seconds, "seconds")
    )


if __name__ == "__main__":
    sys.exit(main())
