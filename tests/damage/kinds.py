"""A run of two steps, and every way in which one of its files is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt.format.commit import COMMIT, HF_INDEX, Attempt
from ckpt.format.metrics import METRICS, encode_metrics
from ckpt.format.values import TensorRef
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, filled, write_step

SHAPES = {
    "model.w": ((64, 33), "float32"),
    "model.b": ((34,), "bfloat16"),
    "model.zeros": ((16, 32), "int16"),
    "optimizer.m": ((64, 33), "float32"),
    "optimizer.v": ((64, 33), "float32"),  # all zero in step 2
    "state.scale": ((3,), "float64"),
}
ZERO = {"model.zeros", "optimizer.v"}


class Kind(NamedTuple):
    """How a run is stored."""

    world: int
    encoding: str
    parity: bool

    def __str__(self) -> str:
        parity = "parity" if self.parity else "no parity"
        return f"{self.world} rank{'s' if self.world > 1 else ''}, {self.encoding}, {parity}"


def contents(step: int) -> dict[str, bytes]:
    """Name -> bytes of a whole tensor in a step."""
    found = {}
    for name, (shape, dtype) in SHAPES.items():
        data = filled(shape, dtype, step)
        found[name] = bytes(len(data)) if name in ZERO and step == 2 else data
    return found


def prepare(root: Path, kind: Kind) -> None:
    """Step 1 by writer 1, step 2 by writer 2, with layouts of their own."""
    run = Run.open(root)
    for step in (1, 2):
        writer = run.open_writer(job=f"job {step}", world=kind.world, resumed_from=step - 1 or None).number
        sharded: dict[str, Any] = {"mesh": (kind.world,), "placements": ("S0",)}
        tensors = []
        for name, data in contents(step).items():
            shape, dtype = SHAPES[name]
            group = name.partition(".")[0]
            cut = sharded if shape[0] % 2 == 0 and (name != "model.b" or step == 1) else {}
            tensors.append(HandTensor(name, dtype, shape, data, group, **cut))
        nested: dict[str, Any] = {"epoch": step}
        for name in SHAPES:
            nested.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = TensorRef(name)
        write_step(
            run,
            step,
            tensors,
            world=kind.world,
            values=nested,
            aliases={"model.tied": "model.b"} if step == 1 else {},
            encoding=kind.encoding,
            parity=[range(kind.world)] if kind.parity else [],
            extra={METRICS: encode_metrics(Attempt(step, writer, 1), {"val_loss": 1 / step})},
            writer=writer,
        )


def target() -> dict[str, Any]:
    """A state to load into, nothing of which is what was saved."""
    state: dict[str, Any] = {"epoch": -1}
    for name, (shape, dtype) in SHAPES.items():
        group, _, key = name.partition(".")
        state.setdefault(group, {})[key] = torch.full(shape, 77, dtype=getattr(torch, dtype))
    return state


def holds(state: dict[str, Any]) -> int | None:
    """The step that ``state`` is equal to bit for bit (0: untouched), or None."""
    found = {}
    for name in SHAPES:
        group, _, key = name.partition(".")
        found[name] = bytes(state[group][key].contiguous().view(torch.uint8).numpy().tobytes())
    for step in (1, 2):
        if found == contents(step) and state["epoch"] == step:
            return step
    untouched = target()
    same = all(torch.equal(state[g][k], untouched[g][k]) for g, _, k in (name.partition(".") for name in SHAPES))
    return 0 if same and state["epoch"] == -1 else None


def files_of(root: Path) -> list[str]:
    """Every file that step 2 stands on, as keys."""
    run = Run.open(root)
    state = run.find(2)
    assert state.commit is not None
    keys = [str(path.relative_to(root)) for path in sorted((root / state.attempt.folder).iterdir())]
    keys += [f"layouts/{ref.digest}.json" for ref in state.commit.layouts]
    return [*keys, "writers/000002.json"]


def flip(path: Path, at: int) -> None:
    """One bit of the byte there."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << (abs(at) % 8)
    path.write_bytes(raw)


class Damage(NamedTuple):
    """One damage to one file; ``tensors`` are those whose chunks it must be told of (any one of them), if any."""

    what: str
    key: str
    tensors: tuple[str, ...] = ()


def damages(root: Path) -> Iterator[Damage]:
    """Every damage to every file of step 2; ``inflict`` carries one out."""
    run = Run.open(root)
    state = run.find(2)
    assert state.commit is not None
    places = payload_places(run)
    for key in files_of(root):
        path = root / key
        raw, size, name = path.read_bytes(), path.stat().st_size, path.name
        for at, tensor in places.get(key, []):
            yield Damage(f"flip {at}", key, (tensor,))
        if key not in places:
            # Nothing pins a writer's record: what still reads as one is not seen.
            flips = [0, size - 1] if key.startswith("writers/") else [0, size // 2, size - 1]
            yield from (Damage(f"flip {at}", key) for at in flips)
        elif name.endswith(".safetensors"):
            header_nbytes = min(at for at, _ in places[key])
            yield from (Damage(f"flip {at}", key) for at in (0, 100, header_nbytes - 1))
        for what in ("cut 1", f"cut {size - size // 2}", "append", "empty", "delete", "folder", "symlink"):
            yield Damage(what, key)
        before = step_before(run, key)
        if before is not None and (root / before).exists() and (root / before).read_bytes() != raw:
            yield Damage(f"put {before}", key)
        for other in files_of(root):
            if other > key and (root / other).stat().st_size == size and (root / other).read_bytes() != raw:
                yield Damage(f"swap {other}", key)
        if name.startswith("part-"):
            yield from (Damage(what, key) for what in ("strip digests", "alter a digest"))
        if name == COMMIT:
            yield from (Damage(what, key) for what in ("no second line", "another second line", "second line twice"))


def step_before(run: Run, key: str) -> str | None:
    """The same-named file of step 1."""
    folder, _, name = key.partition("/")
    if folder == "writers":
        return "writers/000001.json"
    return f"{run.find(1).attempt.folder}/{name}" if folder.startswith("step-") else None


def payload_places(run: Run) -> dict[str, list[tuple[int, str]]]:
    """Data file -> (a byte in it, the tensor whose it is): begin, middle and end of every shard."""
    from ckpt.reading.spans import file_spans
    from ckpt.reading.step import StepReader

    reader = StepReader.open(run, 2)
    found: dict[str, list[tuple[int, str]]] = {}
    for rank in range(reader.commit.world):
        for shards in reader.files(reader.part(rank)):
            places = found[run.key(reader.attempt, shards.file.name)] = []
            for span in file_spans(shards):
                if span.tensor is not None:
                    ats = {span.offset, span.offset + span.nbytes // 2, span.offset + span.nbytes - 1}
                    places.extend((at, span.tensor) for at in sorted(ats))
    return found


def inflict(root: Path, damage: Damage) -> None:
    """Carry out one damage on a run."""
    path, (verb, _, rest) = root / damage.key, damage.what.partition(" ")
    if verb == "flip":
        flip(path, int(rest))
    elif verb == "cut":
        os.truncate(path, path.stat().st_size - int(rest))
    elif verb == "append":
        path.write_bytes(path.read_bytes() + b"X")
    elif verb == "empty":
        path.write_bytes(b"")
    elif verb == "delete":
        path.unlink()
    elif verb == "folder":
        path.unlink()
        path.mkdir()
    elif verb == "symlink":
        elsewhere = root.parent / f"{root.name}-elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    elif verb == "put":
        path.write_bytes((root / rest).read_bytes())
    elif verb == "swap":
        other = root / rest
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)
    elif verb in {"strip", "alter"}:
        part = json.loads(path.read_bytes())
        for file in part["files"]:
            field = "chunks" if file["chunks"] else "packed"
            if verb == "strip":
                file[field] = []
            else:
                first = file[field][0]
                file[field][0] = "0" * 32 if field == "chunks" else ["0" * 32, *first[1:]]
        path.write_bytes(json.dumps(part, separators=(",", ":")).encode())
    else:
        lines = path.read_bytes().splitlines(keepends=True)
        second = {"no": [], "another": [b"0" * 32 + b"\n"], "second": [lines[1], lines[1]]}[verb]
        path.write_bytes(b"".join([lines[0], *second]))


def load_reads(damage: Damage) -> bool:
    """Whether a load meets the damage: it reads no index, no parity and no metrics."""
    name = damage.key.rpartition("/")[2]
    return name not in {HF_INDEX, METRICS} and not name.startswith("parity-")
