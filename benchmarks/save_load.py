"""Save and load one FSDP2 training job with ckpt, with torch.distributed.checkpoint (DCP) and with others, in one run.

Run from the project's root::

    torchrun --nproc-per-node 2 benchmarks/save_load.py                  # 1.5 GB, 5 pairs
    torchrun --nproc-per-node 2 benchmarks/save_load.py --quick --check  # 0.4 GB, 3 pairs, under 50 s

The job is GPT-2 small under ``fully_shard`` with AdamW after one step (``workload.py``): fp32 parameters and two
moments, 592 tensors. After two rounds (with --quick one) that are not counted (imports, the first touch of memory, and
a check that all read back exactly what they wrote) each round measures ckpt, DCP and the machine's floors, in
alternating order, and the first rounds the other peers too (with --quick none); the values change between rounds.
Reported are medians of the rounds, and medians of the rounds' ratios; a time is always that of the slower rank.

stall         seconds until the call returns and training may go on
durable save  seconds from the call until the step is complete and on the disk
cold load     into a job that exists, after fsync and posix_fadvise(DONTNEED) of every file
warm load     the same with every file in the page cache
os.sync       save and os.sync, for peers that do not fsync
stall, first  the first save of a new job, with its ``Checkpointer``, against the same job's third (``first_save.py``)
floors        the same bytes, by the same ranks at once: copied into memory touched before; written with O_DIRECT from
              page-aligned memory, durable; read cold (the best of O_DIRECT by one thread and by two, and buffered)

DCP's calls include its walk over model and optimizer, as a user's do; what the walk alone takes is printed too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import first_save
import floors
import torch
import torch.distributed as dist
from peers import Peer, file_peers, missing
from peers_dcp import Dcp
from pictures import plot_bars
from processes import bytes_read, bytes_written, keeper_pid
from ranks import Seconds, begin, of_all, on_rank_0, remove, settle, slowest, timed, workplace
from report import Figure, finish, machine, options
from torch.distributed.device_mesh import init_device_mesh
from workload import SIZES, Job, Size, parse

import ckpt

OTHERS_ROUNDS = 3  # counted rounds of peers that are in no ratio
COLD_READS = ("read direct", "read direct twice", "read buffered")


@dataclass(frozen=True)
class Row:
    """One line of the result: a figure, what it is compared with, and the largest ratio allowed."""

    figure: str
    against: str
    bound: float | None = None
    unit: str = "s"


ROWS = (
    Row("ckpt stall", "dcp async stall", bound=0.7),
    Row("ckpt stall", "floor copy", bound=1.15),
    Row("ckpt stall, first", "ckpt stall, third", bound=1.5),
    Row("ckpt durable save", "dcp save", bound=0.6),
    Row("ckpt durable save", "floor write", bound=1.25),
    Row("ckpt cold load", "floor cold read", bound=1.2),
    Row("ckpt cold load", "dcp cold load", bound=0.9),
    Row("ckpt warm load", "dcp warm load", bound=0.7),
    Row("ckpt bytes written", "unique bytes", bound=1.01, unit="bytes"),
    Row("ckpt bytes read", "bytes needed", bound=1.01, unit="bytes"),
    Row("ckpt most bytes of a rank, FSDP", "mean bytes of a rank, FSDP", bound=1.1, unit="bytes"),
    Row("ckpt most bytes of a rank, DDP", "mean bytes of a rank, DDP", bound=1.1, unit="bytes"),
)


class Bench:
    """The jobs, the places on disk, and one method per thing that is measured."""

    def __init__(self, folder: Path, size: Size, *, quick: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.job, self.target = Job(size, mesh, seed=1), Job(size, mesh, seed=2)
        self.nbytes = self.job.unique_nbytes()
        self.folder = folder
        self.run = folder / "ckpt"
        self.raw = folder / "raw"
        self.buffer = floors.Buffer(self.job.needed_nbytes())
        self.dcp = Dcp(self.job, self.target)
        self.others = [] if quick else [self.dcp.process_peer(), *file_peers(self.job, self.target)]
        on_rank_0(lambda: self.raw.mkdir(parents=True))

    def round(self, number: int, *, check: bool, others: bool) -> Seconds:
        """Measure everything once; ``check`` compares what was read with what was written."""
        self.job.change()
        sides: list[Callable[[], Seconds]] = [
            lambda: self.measure_ckpt(number, check=check),
            lambda: self.measure_peers(self.dcp.peers(), check=check) | {"dcp walk": self.dcp.walk_s()},
            lambda: self.measure_floors(number),
        ]
        if number % 2:
            sides.reverse()
        seconds: Seconds = {}
        for side in sides:
            seconds |= slowest(side())
        return seconds | (slowest(self.measure_peers(self.others, check=check)) if others else {})

    def measure_ckpt(self, number: int, *, check: bool) -> Seconds:
        """``ckpt.save``, its result, and two loads; and the bytes of all that."""
        settle()
        written = bytes_written(keeper_pid())
        dist.barrier()
        started = time.perf_counter()
        pending = ckpt.save(self.run, number, self.job.state)
        stall = time.perf_counter() - started
        nbytes = pending.result().nbytes
        durable = time.perf_counter() - started
        dist.barrier()
        written = bytes_written(keeper_pid()) - written
        read: list[int] = []

        def load() -> None:
            before = bytes_read()
            ckpt.load(self.run, self.target.state)
            read.append(bytes_read() - before)

        cold, warm = self.measure_loads(self.run, load, check=check)
        # One old step is enough: the disk must hold no more than a few states.
        on_rank_0(lambda: remove(self.run.glob(f"step-{number - 1:08d}-*")))
        of_ranks = of_all(nbytes)
        return {
            "ckpt stall": stall,
            "ckpt durable save": durable,
            "ckpt cold load": cold,
            "ckpt warm load": warm,
            "ckpt bytes written": written,
            "unique bytes": self.nbytes,
            "ckpt bytes read": sum(of_all(max(read))),
            "bytes needed": sum(of_all(self.target.needed_nbytes())),
            "ckpt most bytes of a rank, FSDP": max(of_ranks),
            "mean bytes of a rank, FSDP": sum(of_ranks) / len(of_ranks),
        }

    def measure_peers(self, found: list[Peer], *, check: bool) -> Seconds:
        """Each peer's save and its loads."""
        seconds: Seconds = {}
        for peer in found:
            place = self.folder / peer.name.replace(" ", "-")
            settle()
            started = time.perf_counter()
            wait = peer.save(place)
            if peer.asynchronous:
                seconds[f"{peer.name} stall"] = time.perf_counter() - started
            wait()
            seconds[f"{peer.name} save"] = time.perf_counter() - started
            if not peer.durable:
                settle()
                seconds[f"{peer.name} save, os.sync"] = time.perf_counter() - started
            for name, load in peer.loads.items():
                cold, warm = self.measure_loads(place, lambda load=load, place=place: load(place), check=check)  # type: ignore[misc]
                seconds |= {f"{name} cold load": cold, f"{name} warm load": warm}
            on_rank_0(lambda place=place: remove([place]))  # type: ignore[misc]  # mypy cannot infer such a lambda
        return seconds

    def measure_loads(self, stored: Path, load: Callable[[], object], *, check: bool) -> tuple[float, float]:
        """(cold, warm) seconds."""
        if check:
            for tensor in self.target.tensors():
                tensor.zero_()
        on_rank_0(lambda: floors.drop_cache(stored))
        cold = timed(load)
        if check:
            for (name, wanted), got in zip(self.job.named_tensors().items(), self.target.tensors(), strict=True):
                assert torch.equal(wanted, got), f"{stored}: {name}: what was read is not what was written"
        on_rank_0(lambda: floors.fill_cache(stored))
        return cold, timed(load)

    def measure_floors(self, number: int) -> Seconds:
        """Copy, write and read of this rank's bytes."""
        path = self.raw / f"{number}-{dist.get_rank()}"
        shards = self.job.tensors()
        settle()
        copy = floors.copy_s(shards, self.buffer)
        settle()
        write = floors.write_s(path, self.buffer)
        reads = []
        for direct, threads in ((True, 1), (True, 2), (False, 1)):
            on_rank_0(lambda: floors.drop_cache(self.raw))
            reads.append(floors.read_s(path, self.buffer, direct=direct, threads=threads))
        path.unlink()
        # The best kind is chosen on the slower rank, hence a name for each until then.
        return {"floor copy": copy, "floor write": write, **dict(zip(COLD_READS, reads, strict=True))}


def balance_of_ddp(folder: Path, size: Size) -> Seconds:
    """How evenly two ranks share what both of them hold whole."""
    job = Job(size, None, seed=3)
    found = of_all(ckpt.save(folder / "ddp", 1, job.state).result().nbytes)
    return {"ckpt most bytes of a rank, DDP": max(found), "mean bytes of a rank, DDP": sum(found) / len(found)}


def figures(rounds: list[Seconds], first: list[Seconds]) -> list[Figure]:
    """Medians, and medians of ratios, in the order of ROWS; then all else that was measured."""
    taken: dict[str, list[float]] = defaultdict(list)
    for measured in rounds:
        for name, value in measured.items():
            if name not in COLD_READS:
                taken[name].append(value)
        taken["floor cold read"].append(min(measured[name] for name in COLD_READS))
        taken["dcp async stall without its walk"].append(measured["dcp async stall"] - measured["dcp walk"])
    taken["ckpt stall, first"] = [pair["first"] for pair in first]
    taken["ckpt stall, third"] = [pair["steady"] for pair in first]
    found = [Figure("state", median(taken["unique bytes"]), "bytes")]
    for row in ROWS:
        ratio = median(a / b for a, b in zip(taken[row.figure], taken[row.against], strict=True))
        found.append(Figure(row.figure, median(taken[row.figure]), row.unit, row.against, ratio, row.bound))
    shown = {figure.name for figure in found}
    rest = [name for name in taken if name not in shown]
    found += [Figure(name, median(taken[name]), "bytes" if "bytes" in name else "s") for name in rest]
    # The step that ran while memory was touched: a first save after a shorter one finds less of it ready.
    return [*found, Figure("training step before the first save", median(pair["step"] for pair in first), "s")]


def picture(path: Path, title: str, found: list[Figure]) -> None:
    """Bars for each thing that is measured: ckpt, the peers and the floor."""
    value = {figure.name: figure.value for figure in found}

    def bars(suffix: str, floor: str | None = None) -> dict[str, float]:
        of_all = {name.removesuffix(suffix): value[name] for name in value if name.endswith(suffix)}
        return of_all | ({"floor": value[floor]} if floor else {})

    names = {"ckpt": "ckpt durable save", **{name: f"{name} save" for name in ("dcp", "dcp async", "dcp process")}}
    durable = {label: value[name] for label, name in names.items() if name in value}
    durable |= {**bars(" save, os.sync"), "floor": value["floor write"]}
    groups = {
        "until the save is on the disk (seconds)": durable,
        "how long a save stalls training (seconds)": bars(" stall", "floor copy"),
        "cold load (seconds)": bars(" cold load", "floor cold read"),
        "warm load (seconds)": bars(" warm load"),
    }
    plot_bars(path, title, groups)


def arguments() -> argparse.Namespace:
    """The command line."""
    args = parse(options(__doc__))
    args.pairs = args.pairs or (3 if args.quick else 5)
    return args


def measure(args: argparse.Namespace, folder: Path, first: list[Seconds]) -> list[Figure]:
    """All rounds; what they come to."""
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    size = SIZES[args.size]
    for package in missing():
        say(f"{package}: not installed")
    say(f"first saves of new jobs (s): {first}", flush=True)
    even = balance_of_ddp(folder, SIZES["tiny"])  # and the keeper is there from now on
    bench = Bench(folder, size, quick=args.quick)
    rounds = []
    # The first touch of memory costs several copies: of two arenas, of staging memory, of the buffers of others.
    warmups = 1 if args.quick else 2
    for number in range(1 - warmups, args.pairs + 1):
        others = 0 <= number <= OTHERS_ROUNDS
        rounds.append(bench.round(number + warmups, check=number <= 1, others=others) | even)
        what = f"pair {number} of {args.pairs}" if number > 0 else "not counted"
        say(f"{what}: " + ", ".join(f"{name} {value:.3g}" for name, value in rounds[-1].items()), flush=True)
    bench.dcp.close()
    return figures(rounds[warmups:], first)


def main() -> int:
    """Measure, report; the exit code."""
    args = arguments()
    jobs = args.dir.resolve() / "first_save"
    first_saves = first_save.pairs(jobs, SIZES[args.size], 1 if args.quick else args.pairs)
    first = begin()
    on_rank_0(lambda: remove([jobs]))
    with workplace(args.dir, "save_load") as folder:
        where = machine(folder)
        found = measure(args, folder, first_saves)
    world = dist.get_world_size()
    dist.destroy_process_group()
    if not first:
        return 0
    title = f"save and load of {found[0].value / 1e9:.2f} GB by {world} ranks, medians of {args.pairs} pairs"
    return finish(args, title, where, found, lambda path, title: picture(path, title, found))


if __name__ == "__main__":
    sys.exit(main())
