"""Save and load the same DTensor state with ckpt and with torch.distributed.checkpoint (DCP), in one run.

Run from the project's root::

    torchrun --nproc-per-node 2 benchmarks/save_load.py                  # 1.5 GB, 5 pairs
    torchrun --nproc-per-node 2 benchmarks/save_load.py --quick --check  # 0.4 GB, 3 pairs, under 50 s

The state is what a training step of a sharded fp32 model holds: 24 layers, each a parameter and two
moments, cut along dimension 0. After two rounds that are not counted (imports, the first touch of ckpt's
two arenas, and a check that both read back exactly what they wrote) each round measures both and the machine's
floors, in alternating order; the values change between rounds. Reported are medians of the rounds, and
medians of the rounds' ratios; a time is always that of the slower rank. Fair to DCP: its asynchronous save
has a process group of its own and a stager whose memory is reused; its files are fsynced, as ckpt's are.

stall         seconds until the call returns and training may go on (first: the worst of the rounds not counted)
durable save  seconds from the call until the step is complete and on the disk
cold load     into tensors that exist, after fsync and posix_fadvise(DONTNEED) of every file
warm load     the same with every file in the page cache
floors        the same bytes, by the same ranks at once: copied into memory touched before; written with
              O_DIRECT from page-aligned memory, durable; read cold (the better of O_DIRECT and buffered)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import floors
import torch
import torch.distributed as dist
from report import Figure, broken, machine, plot_bars, show, write_json
from torch.distributed.checkpoint import state_dict_loader as dcp_loader
from torch.distributed.checkpoint import state_dict_saver as dcp_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt

LAYERS = 24
KINDS = ("parameter", "exp_avg", "exp_avg_sq")
COLUMNS = 2560
WARMUPS = 2  # ckpt alternates between two arenas, and the first touch of memory costs several copies

State = dict[str, dict[str, DTensor]]
Seconds = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One line of the result: a figure, what it is compared with, and the largest ratio allowed."""

    figure: str
    against: str | None = None
    bound: float | None = None


ROWS = (
    Row("ckpt stall", "dcp async stall"),
    Row("ckpt stall", "floor copy"),
    Row("ckpt durable save", "dcp save", bound=0.6),
    Row("ckpt durable save", "floor write"),
    Row("ckpt cold load", "dcp cold load"),
    Row("ckpt cold load", "floor cold read"),
    Row("ckpt warm load", "dcp warm load"),
    Row("dcp async stall"),
    Row("dcp async save"),
    Row("dcp save"),
    Row("dcp cold load"),
    Row("dcp warm load"),
    Row("floor copy"),
    Row("floor write"),
    Row("floor cold read"),
)


def make_state(mesh: DeviceMesh, rows: int, seed: int) -> State:
    """``{"layers.0": {"parameter": (rows, COLUMNS), ...}, ...}``, fp32, Shard(0)."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())

    def tensor() -> DTensor:
        local = torch.randn(rows // mesh.size(), COLUMNS, generator=generator)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    return {f"layers.{i}": {kind: tensor() for kind in KINDS} for i in range(LAYERS)}


def local_tensors(state: State) -> list[torch.Tensor]:
    """This rank's shards."""
    return [tensor.to_local() for layer in state.values() for tensor in layer.values()]


def slowest(seconds: Seconds) -> Seconds:
    """Each figure of the slower rank."""
    values = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(seconds, values.tolist(), strict=True))


def timed(act: Callable[[], object]) -> float:
    """Seconds of one call that all ranks begin together, with no older dirty pages to write."""
    settle()
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def settle() -> None:
    """Wait for all ranks and for the disk."""
    on_rank_0(os.sync)


def on_rank_0(act: Callable[[], object]) -> None:
    """Let rank 0 act while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def remove(folders: Iterable[Path]) -> None:
    """Delete whole folders."""
    for folder in folders:
        shutil.rmtree(folder)


class Bench:
    """The state, the places on disk, and one method per thing that is measured."""

    def __init__(self, folder: Path, gigabytes: float) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        world = self.mesh.size()
        rows = max(1, round(gigabytes * 1e9 / (LAYERS * len(KINDS) * COLUMNS * 4) / world / 2)) * 2 * world
        self.state = make_state(self.mesh, rows, seed=1)
        self.target = make_state(self.mesh, rows, seed=2)
        self.nbytes = sum(tensor.nbytes for tensor in local_tensors(self.state)) * world
        self.folder = folder
        self.run = folder / "ckpt"
        self.raw = folder / "raw"
        self.buffer = floors.Buffer(self.nbytes // world)
        self.async_group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        on_rank_0(lambda: self.raw.mkdir(parents=True))

    def round(self, number: int, *, check: bool) -> Seconds:
        """Measure everything once; ``check`` compares what was read with what was written."""
        for tensor in local_tensors(self.state):
            tensor.mul_(1.001)  # no save finds the bytes of the one before
        sides = [self.measure_ckpt, self.measure_dcp]
        if number % 2:
            sides.reverse()
        seconds: Seconds = {}
        for side in sides:
            seconds |= side(number, check=check)
        return slowest(seconds | self.measure_floors(number))

    def measure_ckpt(self, number: int, *, check: bool) -> Seconds:
        """``ckpt.save``, its result, and two loads."""
        settle()
        begin = time.perf_counter()
        pending = ckpt.save(str(self.run), number, {"train": self.state})
        stall = time.perf_counter() - begin
        pending.result()
        durable = time.perf_counter() - begin

        def load() -> object:
            return ckpt.load(str(self.run), {"train": self.target})

        cold, warm = self.measure_loads(self.run, load, check=check)
        # One old step is enough: the disk must hold no more than a few states.
        on_rank_0(lambda: remove(self.run.glob(f"step-{number - 1:08d}-*")))
        return {
            "ckpt stall": stall,
            "ckpt durable save": durable,
            "ckpt cold load": cold,
            "ckpt warm load": warm,
        }

    def measure_dcp(self, number: int, *, check: bool) -> Seconds:
        """``dcp.save`` with two loads, and ``dcp.async_save``."""
        plain, other = self.folder / f"dcp-{number}", self.folder / f"dcp-async-{number}"
        save = timed(lambda: dcp_saver.save({"train": self.state}, checkpoint_id=plain))

        def load() -> object:
            return dcp_loader.load({"train": self.target}, checkpoint_id=plain)

        cold, warm = self.measure_loads(plain, load, check=check)
        settle()
        begin = time.perf_counter()
        future = dcp_saver.async_save(
            {"train": self.state}, checkpoint_id=other, process_group=self.async_group, async_stager=self.stager
        )
        stall = time.perf_counter() - begin
        assert not isinstance(future, dcp_saver.AsyncSaveResponse)  # that is for stagers in the background
        future.result()
        total = time.perf_counter() - begin
        on_rank_0(lambda: remove([plain, other]))
        return {
            "dcp save": save,
            "dcp async stall": stall,
            "dcp async save": total,
            "dcp cold load": cold,
            "dcp warm load": warm,
        }

    def measure_loads(self, stored: Path, load: Callable[[], object], *, check: bool) -> tuple[float, float]:
        """(cold, warm) seconds."""
        if check:
            for tensor in local_tensors(self.target):
                tensor.zero_()
        on_rank_0(lambda: floors.drop_cache(stored))
        cold = timed(load)
        if check:
            for wanted, got in zip(local_tensors(self.state), local_tensors(self.target), strict=True):
                assert torch.equal(wanted, got), f"{stored}: what was read is not what was written"
        on_rank_0(lambda: floors.fill_cache(stored))
        return cold, timed(load)

    def measure_floors(self, number: int) -> Seconds:
        """Copy, write and read of this rank's bytes."""
        path = self.raw / f"{number}-{dist.get_rank()}"
        shards = local_tensors(self.state)
        settle()
        copy = floors.copy_s(shards, self.buffer)
        settle()
        write = floors.write_s(path, self.buffer)
        reads = []
        for direct in (True, False):
            on_rank_0(lambda: floors.drop_cache(self.raw))
            reads.append(floors.read_s(path, self.buffer, direct=direct))
        path.unlink()
        # The better kind is chosen on the slower rank, hence two names until then.
        return {"floor copy": copy, "floor write": write, "read direct": reads[0], "read buffered": reads[1]}


def figures(nbytes: int, rounds: list[Seconds]) -> list[Figure]:
    """Medians, and medians of ratios, in the order of ROWS; then the first stalls."""
    taken: dict[str, list[float]] = defaultdict(list)
    for seconds in rounds[WARMUPS:]:
        for name, value in seconds.items():
            taken[name].append(value)
        taken["floor cold read"].append(min(seconds["read direct"], seconds["read buffered"]))
    found = [Figure("state", nbytes, "bytes")]
    for row in ROWS:
        ratio = None
        if row.against is not None:
            ratio = median(a / b for a, b in zip(taken[row.figure], taken[row.against], strict=True))
        found.append(Figure(row.figure, median(taken[row.figure]), "s", row.against, ratio, row.bound))
    first = {name: max(seconds[name] for seconds in rounds[:WARMUPS]) for name in ("ckpt stall", "dcp async stall")}
    return found + [Figure(f"{name}, first", value, "s") for name, value in first.items()]


def picture(path: Path, title: str, found: list[Figure]) -> None:
    """Bars: ckpt, DCP and the floor, for each thing that is measured."""
    value = {figure.name: figure.value for figure in found}
    groups = {
        "stall": ("ckpt stall", "dcp async stall", "floor copy"),
        "durable save": ("ckpt durable save", "dcp save", "floor write"),
        "cold load": ("ckpt cold load", "dcp cold load", "floor cold read"),
        "warm load": ("ckpt warm load", "dcp warm load"),
    }
    labels = ("ckpt", "DCP", "floor")
    bars = {name: {labels[i]: value[row] for i, row in enumerate(rows)} for name, rows in groups.items()}
    plot_bars(path, title, bars, "seconds")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, help="size of the state (default 1.5; with --quick 0.4)")
    parser.add_argument("--pairs", type=int, help="counted rounds (default 5; with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="small and short, under 50 s")
    parser.add_argument("--dir", type=Path, default=Path("bench-out"), help="a folder to make, use and remove again")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound does not hold")
    args = parser.parse_args()
    args.gigabytes = args.gigabytes or (0.4 if args.quick else 1.5)
    args.pairs = args.pairs or (3 if args.quick else 5)
    return args


def main() -> int:
    """Measure, report; the exit code."""
    args = arguments()
    torch.set_num_threads(1)  # every rank has its core
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    folder = args.dir / "save_load"
    where = ""
    try:
        on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True))
        bench = Bench(folder, args.gigabytes)
        where = machine(folder)
        rounds = []
        for number in range(1, WARMUPS + args.pairs + 1):
            rounds.append(bench.round(number, check=number == 1))
            if first:
                what = f"pair {number - WARMUPS} of {args.pairs}" if number > WARMUPS else "not counted"
                print(
                    f"{what} (s): " + ", ".join(f"{name} {value:.2f}" for name, value in rounds[-1].items()), flush=True
                )
        bench.stager.close()
    finally:
        if first:  # every round ends in a collective: no rank still reads or writes
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: it was there before
                args.dir.rmdir()
    dist.destroy_process_group()
    return report(args, bench, where, figures(bench.nbytes, rounds)) if first else 0


def report(args: argparse.Namespace, bench: Bench, where: str, found: list[Figure]) -> int:
    """Print and write the figures; 1 when --check finds a broken bound."""
    world = bench.mesh.size()
    title = f"save and load of {bench.nbytes / 1e9:.2f} GB by {world} ranks, medians of {args.pairs} pairs"
    show(title, where, found)
    if args.json:
        write_json(args.json, where, found)
    if args.plot:
        picture(args.plot, f"{title}\n{where}", found)
    for sentence in broken(found):
        print(f"broken bound: {sentence}", file=sys.stderr)
    return int(args.check and bool(broken(found)))


if __name__ == "__main__":
    sys.exit(main())
