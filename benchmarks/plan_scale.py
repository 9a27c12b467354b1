"""Plan saves and loads of very large jobs, one simulated rank at a time: nothing is copied, nobody is asked.

Run from the project's root, with plain python::

    python benchmarks/plan_scale.py --check          # up to 16,384 ranks, 6,012 tensors
    python benchmarks/plan_scale.py --quick --check  # up to 2,048 ranks

The state is that of a transformer with 125 blocks of width 16,384 (537 billion parameters in fp32) trained by
AdamW: parameters, two moments, and a step count for each parameter. Biases and norms have a row for each of
16,384 ranks at most; the counts are scalars. It is held in three ways: FSDP (Shard(0) on a mesh of one dimension),
HSDP (Replicate x Shard(0)), and DDP (a replica on every rank).

plan           seconds that a rank needs at its first save, once the ranks know that their structures are equal:
               digest of the structure, layout, its checks and bytes, files, headers, where each shard is copied to
own part       that part of it which is about this rank only
max / mean     bytes of tensors that a rank writes, over all ranks
written        bytes of all objects of a step, data files with their headers, against the bytes of its tensors
plan of a load seconds from opening the run to the list of chunks to read, for a rank of a job of 8 ranks fewer; COMMIT,
               layouts and parts come from a local store, from the page cache
index read     bytes of COMMIT, layouts and parts that it reads for that

Seconds are medians of the repetitions, of the slowest of the ranks looked at: the first, the middle and the last.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import NamedTuple

from limits import plot_limits
from report import Figure, finish, machine, options
from simulated import OneOfMany, needs, rank_nbytes, structure

from ckpt.engine.prepare import (
    ArenaFile,
    EncodedValues,
    Prepared,
    SavePlan,
    arena_files,
    arena_pieces,
    make_plan,
)
from ckpt.format import records
from ckpt.format.chunk import RAW, chunk_spans
from ckpt.format.commit import Attempt, Commit, FileRef, LayoutRef, encode_commit
from ckpt.format.part import DataFile, Part, encode_part, part_name
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.save import Structure
from ckpt.reading.fetch import Fetch
from ckpt.reading.step import StepReader
from ckpt.run import Run
from ckpt.state import FlatState
from ckpt.store import open_store
from ckpt.testing import RecordingStore

FEWER = 8  # ranks of the job that loads
SCHEMES = ("FSDP", "HSDP", "DDP")

PLAN_S, LOAD_S, COMMIT_NBYTES, INDEX_NBYTES = 0.2, 1.0, 2_000_000, 64 << 20
BALANCE, WRITTEN = 1.1, 1.01
GROWTH = 2.5  # of 64 times the ranks; a tensor of which all hold a replica is cut into more pieces then


class Planned(NamedTuple):
    """What a rank has planned, and how long it took."""

    plan: SavePlan
    files: list[ArenaFile]
    plan_s: float
    own_s: float


def plan_save(what: Structure, rank: int, world: int) -> Planned:
    """What a rank does at its first save, but for asking the others."""
    empty = FlatState(tensors=[], aliases={}, rank_tensors=[], values={}, rank_values={}, optimizers=[], stepped=set())
    gc.collect()  # what earlier measurements have left is not this one's cost
    begin = time.perf_counter()
    digest = what.digest()
    prepared = Prepared(empty, EncodedValues({}, {}, {}), what)
    plan = make_plan(OneOfMany(rank, world), prepared, [digest] * world)
    own = time.perf_counter()
    files, _ = arena_files(plan, rank, world, (), RAW)
    arena_pieces(files, what, rank)
    end = time.perf_counter()
    return Planned(plan, files, end - begin, end - own)


class Seconds(NamedTuple):
    """Of the slowest rank looked at: all of its plan, and that part of it which is about itself."""

    plan_s: float
    own_s: float


def measure_seconds(layers: int, worlds: Sequence[int], repeats: int) -> dict[tuple[str, int], Seconds]:
    """Medians by way of holding the state and ranks. All are measured in turn, so that a burst of noise spoils none."""
    plans: dict[tuple[str, int], dict[int, list[Seconds]]] = {}
    for _ in range(repeats):
        for scheme in SCHEMES:
            for world in worlds:
                what = structure(scheme, world, layers)
                for rank in looked_at(world):
                    planned = plan_save(what, rank, world)
                    of_rank = plans.setdefault((scheme, world), {}).setdefault(rank, [])
                    of_rank.append(Seconds(planned.plan_s, planned.own_s))
    return {
        case: Seconds(
            max(median(taken.plan_s for taken in of_rank) for of_rank in ranks.values()),
            max(median(taken.own_s for taken in of_rank) for of_rank in ranks.values()),
        )
        for case, ranks in plans.items()
    }


def part_of(planned: Planned, attempt: Attempt, rank: int, world: int) -> Part:
    """The part of a rank, with digests of nothing."""
    digest = records.digest(b"")
    files = []
    for file in planned.files:
        chunks = sum(len(chunk_spans(nbytes)) for nbytes in file.task.shards)
        header = len(file.header)
        files.append(
            DataFile(file.task.group, file.task.name, file.task.nbytes, RAW, header, digest, (digest,) * chunks)
        )
    return Part(
        format=records.FORMAT,
        step=attempt.step,
        attempt=attempt.label,
        rank=rank,
        world=world,
        layout=planned.plan.encoded[planned.plan.mine].digest,
        files=tuple(files),
        rank_tensors=(),
        values={} if rank == 0 else None,
        values_digests={},
        rank_values={},
    )


def commit_of(planned: Planned, attempt: Attempt, world: int, parts: dict[int, bytes]) -> Commit:
    """COMMIT of a step. A rank that is not in ``parts`` has a part as long as the longest there, of no digest."""
    nothing, longest = records.digest(b""), max(len(raw) for raw in parts.values())
    digests = {rank: (len(raw), records.digest(raw)) for rank, raw in parts.items()}
    refs = (FileRef(part_name(rank, world), *digests.get(rank, (longest, nothing))) for rank in range(world))
    return Commit(
        format=records.FORMAT,
        step=attempt.step,
        attempt=attempt.label,
        world=world,
        features=(),
        written_by="ckpt 0.1.0",
        created_unix_s=time.time(),
        layouts=tuple(LayoutRef(task.digest, len(task.raw), task.ranks) for task in planned.plan.encoded),
        parts=tuple(refs),
    )


def looked_at(world: int) -> list[int]:
    """The first rank, the middle one and the last."""
    return sorted({0, world // 2, world - 1})


def measure_saves(scheme: str, world: int, layers: int, seconds: Seconds) -> tuple[list[Figure], Planned]:
    """The figures of one way of holding the state, and what rank 0 has planned."""
    what = structure(scheme, world, layers)
    attempt = Attempt(1, 1, 1)
    unique = sum(prod(t.shape) * DTYPE_NBYTES[t.dtype] for t in what.tensors)
    found = {rank: plan_save(what, rank, world) for rank in looked_at(world)}
    first = found[0]
    each = rank_nbytes(first.plan.layouts[0], world)
    for rank, planned in found.items():
        mine = sum(sum(file.task.shards) for file in planned.files)
        if each[rank] != mine or each.sum() != unique:
            raise SystemExit(f"{scheme}: rank {rank} plans to write {mine} bytes, its share is {each[rank]}")
    parts = {rank: encode_part(part_of(planned, attempt, rank, world)) for rank, planned in found.items()}
    commit = encode_commit(commit_of(first, attempt, world, parts))
    part_nbytes = max(len(raw) for raw in parts.values())
    header_nbytes = max(sum(len(file.header) for file in planned.files) for planned in found.values())
    written = unique + (header_nbytes + part_nbytes) * world + len(commit) + len(first.plan.encoded[0].raw)
    name = f"{scheme}, {world:,} ranks"
    return [
        Figure(f"plan: {name}", seconds.plan_s, "s", bound=PLAN_S),
        Figure(f"own part: {name}", seconds.own_s, "s"),
        Figure(f"max / mean: {name}", float(each.max() / each.mean()), "", bound=BALANCE),
        Figure(f"written / unique: {name}", written / unique, "", bound=WRITTEN),
        Figure(f"part: {name}", part_nbytes, "bytes"),
        Figure(f"layout: {name}", len(first.plan.encoded[0].raw), "bytes"),
        Figure(f"COMMIT: {name}", len(commit), "bytes", bound=COMMIT_NBYTES),
    ], first


def plan_load(run: Run, what: Structure, rank: int, memory: memoryview) -> list[Fetch]:
    """What a rank does from opening a run to the list of what it reads."""
    reader = StepReader.of(run, run.find())
    reader.tensors()
    reader.values()
    return [fetch for need in needs(what, rank) for fetch in reader.fetches(need.name, need.box, memory[: need.nbytes])]


def measure_loads(folder: Path, first: Planned, layers: int, world: int, repeats: int) -> list[Figure]:
    """The figures of loading an FSDP state of ``world`` ranks into a job of some ranks fewer."""
    fewer = world - FEWER
    what = structure("FSDP", fewer, layers)
    # A job of a few ranks fewer holds more rows on each, on its first ranks only: those are the busy ones.
    ranks = sorted({*looked_at(fewer), fewer // 4, fewer // 2 - 1})
    url = str(folder / "run")
    run = Run.open(url)
    attempt = Attempt(1, run.open_writer(job="plan_scale", world=world, resumed_from=None).number, 1)
    boxes, tensors = first.plan.boxes, {tensor.name: tensor for tensor in first.plan.layouts[0].tensors}
    holders = {0} | {
        holder
        for rank in ranks
        for need in needs(what, rank)
        for holder, _ in boxes.holders(tensors[need.name], need.box)
    }
    parts = {}
    for holder in holders:
        files, _ = arena_files(first.plan, holder, world, (), RAW)
        parts[holder] = encode_part(part_of(first._replace(files=files), attempt, holder, world))
        run.store.create(run.key(attempt, part_name(holder, world)), parts[holder])
    layouts = [(task.digest, task.raw) for task in first.plan.encoded]
    run.commit(attempt, commit_of(first, attempt, world, parts), layouts)

    seconds, index_nbytes, part_counts = [], [], []
    memory = memoryview(bytearray(max(need.nbytes for rank in ranks for need in needs(what, rank))))
    for rank in ranks:
        times = []
        for _ in range(repeats):
            store = RecordingStore(open_store(url))
            gc.collect()
            begin = time.perf_counter()
            fetches = plan_load(Run(store), what, rank, memory)
            times.append(time.perf_counter() - begin)
        asked = {need.name for need in needs(what, rank)}
        if {fetch.chunk.entry.name for fetch in fetches} != asked:
            raise SystemExit(f"rank {rank} of {fewer} does not read all {len(asked)} tensors that it holds")
        read = [done for done in store.done if done.op == "get"]
        seconds.append(median(times))
        index_nbytes.append(sum(done.nbytes for done in read))
        part_counts.append(len({done.key for done in read if "/part-" in done.key}))
    name = f"FSDP, {world:,} to {fewer:,} ranks"
    return [
        Figure(f"plan of a load: {name}", max(seconds), "s", bound=LOAD_S),
        Figure(f"index read: {name}", max(index_nbytes), "bytes", bound=INDEX_NBYTES),
        Figure(f"parts read: {name}", max(part_counts), "of them"),
    ]


def growth(found: Sequence[Figure], scheme: str, worlds: Sequence[int]) -> Figure:
    """A rank's own part in the largest world, against that in the smallest."""
    value = {figure.name: figure.value for figure in found}
    most, least = f"own part: {scheme}, {worlds[-1]:,} ranks", f"own part: {scheme}, {worlds[0]:,} ranks"
    return Figure(most, value[most], "s", least, value[most] / value[least], GROWTH)


def picture(path: Path, title: str, found: Sequence[Figure], worlds: Sequence[int]) -> None:
    """Seconds over ranks, which should be flat; and how much is used of each bound in the largest world."""
    value = {figure.name: figure.value for figure in found}
    lines = {
        f"{what}, {scheme}": {world: value[f"{what}: {scheme}, {world:,} ranks"] for world in worlds}
        for what in ("plan", "own part")
        for scheme in SCHEMES
    }
    used: dict[str, float] = {}
    for figure in found:
        if figure.bound is not None and figure.ratio is None and f" {worlds[-1]:,} " in figure.name:
            what = figure.name.partition(":")[0]
            beyond = 0 if figure.unit else 1  # of a ratio that is 1 at best, what it is more than that
            used[what] = max(used.get(what, 0), (figure.value - beyond) / (figure.bound - beyond))
    plot_limits(path, title, lines, ("ranks of the job", "planning a save, per rank (s)", PLAN_S), used)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__, pairs=False)
    parser.add_argument(
        "--worlds", type=int, nargs="+", help="ranks, ascending (default 256 2048 16384; with --quick the first two)"
    )
    parser.add_argument("--layers", type=int, default=125, help="blocks of the transformer; each has 48 tensors")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each measurement")
    args = parser.parse_args()
    args.worlds = args.worlds or ([256, 2048] if args.quick else [256, 2048, 16_384])
    return args


def main() -> int:
    """Measure, report; the exit code."""
    args = arguments()
    folder = Path(tempfile.mkdtemp(prefix="plan-scale-"))
    found: list[Figure] = []
    try:
        where = machine(folder)
        seconds = measure_seconds(args.layers, args.worlds, args.repeats)
        for scheme in SCHEMES:
            for world in args.worlds:
                figures, first = measure_saves(scheme, world, args.layers, seconds[scheme, world])
                found += figures
                print(", ".join(f"{figure.name} {figure.value:.4g}" for figure in figures[:3]), flush=True)
            found.append(growth(found, scheme, args.worlds))
            if scheme == "FSDP":
                found += measure_loads(folder, first, args.layers, args.worlds[-1], args.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tensors = 48 * args.layers + 12
    title = (
        f"planning for up to {args.worlds[-1]:,} ranks x {tensors:,} tensors, slowest rank, medians of {args.repeats}"
    )
    return finish(args, title, where, found, lambda path, text: picture(path, text, found, args.worlds))


if __name__ == "__main__":
    sys.exit(main())
