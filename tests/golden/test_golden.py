"""Runs written by earlier versions: every later one reads them, bit for bit. ``make.py`` wrote them."""

from __future__ import annotations

import collections
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.cli import main as cli
from ckpt.engine.load import memory_of
from ckpt.format import records
from ckpt.format.commit import decode_commit, encode_commit
from ckpt.format.layout import decode_layout, encode_layout
from ckpt.format.part import decode_part, encode_part
from ckpt.format.safetensors import parse_header
from ckpt.format.writer import decode_writer, encode_writer
from ckpt.reading.alarms import step_alarms
from ckpt.run import Run
from tests.format import spec_reader
from tests.format.test_values import same
from tests.golden.make import PLAIN

HERE = Path(__file__).parent
EXPECTED: dict[str, dict[str, Any]] = json.loads((HERE / "expected.json").read_text())
RUNS = sorted(EXPECTED)


def facts(tensor: Any) -> list[Any]:
    tensor = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), records.digest(memory_of(tensor.contiguous()))]


def leaves(tree: Any, prefix: str) -> dict[str, Any]:
    """Tensors and arrays of a nested state by dotted path."""
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {
        name: leaf for key, value in items for name, leaf in leaves(value, f"{prefix}.{key}" if prefix else key).items()
    }


@pytest.mark.parametrize("run", RUNS)
def test_the_spec_reader_reads_them(run):
    """The reader written from SPEC.md alone finds every tensor, bit for bit."""
    step = spec_reader.read_step(HERE / run)
    found = {name: [dtype, list(shape), records.digest(data)] for name, (dtype, shape, data) in step.tensors.items()}
    found |= {alias: found[name] for alias, name in step.aliases.items() if not alias.startswith("optimizer.")}
    assert found == EXPECTED[run]


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch warns of every complex32
@pytest.mark.parametrize("run", RUNS)
def test_ckpt_reads_them(run):
    """So does ckpt, and finds nothing wrong."""
    assert [str(problem) for problem in ckpt.verify(HERE / run).problems] == []
    found = leaves(ckpt.read(HERE / run), "")
    plain = {name: facts(leaf) for name, leaf in found.items() if not name.startswith(("own", "optimizer"))}
    assert plain == {name: fact for name, fact in EXPECTED[run].items() if not name.startswith("optimizer")}


def test_optimizer_by_names():
    """The optimizer's moments are found under their parameters' names, with the groups' settings."""
    step = spec_reader.read_step(HERE / "sharded")
    (values,) = step.values
    tag, optimizer = values["optimizer"]
    assert (tag, optimizer["prefix"]) == ("optimizer", "optimizer")
    assert [group["params"] for group in optimizer["groups"]] == [
        ["model.embed.weight"], ["model.norm.weight", "model.norm.bias"],
    ]  # fmt: skip
    assert [group["lr"] for group in optimizer["groups"]] == [1e-3, 0.5]
    assert {name for name in step.tensors if ".exp_avg." in name} == {
        "optimizer.state.exp_avg.model.embed.weight",
        "optimizer.state.exp_avg.model.norm.weight",
        "optimizer.state.exp_avg.model.norm.bias",
    }
    assert step.aliases["model.head.weight"] == "model.embed.weight"


def test_plain_values():
    """Every plain value comes back, value and type, through ckpt; and as SPEC.md tells through its reader."""
    found = ckpt.read(HERE / "sharded")["plain"]
    assert same(found, PLAIN)
    values = spec_reader.read_step(HERE / "sharded").values[0]["plain"]
    assert list(values) == list(PLAIN)
    common = {key: value for key, value in PLAIN.items() if key not in {"when", "dtype"}}
    assert {key: values[key] for key in common} == common
    assert isinstance(values["tuple"][3], float)
    assert isinstance(found["defaultdict"], collections.defaultdict)


def test_per_rank_values():
    """Each rank's own values and tensors are kept apart."""
    step = spec_reader.read_step(HERE / "sharded")
    for rank in range(2):
        (own,) = step.rank_values[rank].values()
        (state,) = step.rank_tensors[rank].values()
        assert own["seed"] == 100 + rank
        assert state == ("uint8", (3,), bytes([rank] * 3))


def test_what_watches_over_a_step(tmp_path):
    """Metrics, alarms and parity are read; and what the parity of both ranks' files is for still works."""
    shutil.copytree(HERE / "watched", tmp_path / "run")
    run = Run.open(tmp_path / "run")
    found = run.find(5)
    assert found.commit is not None
    metrics = run.metrics(found.attempt, found.commit)
    assert repr(metrics) == "{'accuracy': nan, 'loss': 0.25, 'perplexity': inf, 'samples': 7.0}"
    alarms = {
        (alarm.kind, alarm.tensor): (alarm.nan, alarm.inf) for alarm in step_alarms(run, found.attempt, found.commit)
    }
    assert alarms == {("not finite", "state.halves"): (1, 1)}
    file = next((tmp_path / "run" / found.attempt.folder).glob("state-00001-*"))
    right = file.read_bytes()
    file.unlink()
    assert leaves(ckpt.read(run.url), "").keys() == {"state.halves", "state.same"}
    assert cli(["repair", run.url]) == 0
    assert file.read_bytes() == right


def test_a_rollback():
    """Step 2 of the zstd run is whole, but a later writer went on from step 1."""
    assert ckpt.steps(HERE / "zstd") == [1]
    assert list(spec_reader.live_steps(HERE / "zstd")) == [1]


@pytest.mark.parametrize("run", RUNS)
def test_records_are_written_as_ever(run):
    """Each record, decoded and encoded again, has the same bytes: equal structure keeps its digest over versions."""
    for path in sorted((HERE / run).rglob("*")):
        raw = path.read_bytes() if path.is_file() else b""
        if path.parent.name == "writers":
            again = encode_writer(decode_writer(raw, path.name))
            plain = again[: again.rindex(b',"digest"')] + b"}"
            assert raw in {again, plain}  # the first versions wrote no digest
            assert decode_writer(again, path.name) == decode_writer(raw, path.name)
        elif path.parent.name == "layouts":
            assert encode_layout(decode_layout(raw, path.stem)) == (path.stem, raw)
        elif path.name.startswith("part-"):
            assert encode_part(decode_part(raw, path.name)) == raw
        elif path.name == "COMMIT":
            assert encode_commit(decode_commit(raw, path.name)) == raw
        elif path.suffix == ".safetensors":
            parse_header(raw, len(raw), path.name)


@pytest.mark.parametrize("run", RUNS)
def test_any_flipped_bit_is_seen(tmp_path, run):
    """A bit flipped in any file of a step is found by verify and by the reader of SPEC.md."""
    copy = tmp_path / "run"
    shutil.copytree(HERE / run, copy)
    step = spec_reader.read_step(copy).number
    files = [
        path for path in sorted(copy.rglob(f"step-{step:08d}-*/*")) + sorted(copy.glob("layouts/*")) if path.is_file()
    ]
    for path in files:
        raw = path.read_bytes()
        place = len(raw) * 2 // 3
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        assert not verified(copy, step), path
        if path.suffix != ".xor":  # which a reader may ignore
            with pytest.raises(spec_reader.RefusedError):
                spec_reader.read_step(copy, step)
        path.write_bytes(raw)
    assert verified(copy, step)


def verified(run: Path, step: int) -> bool:
    try:
        return ckpt.verify(run, step=step).ok
    except (ckpt.DamagedError, ckpt.NotFoundError):
        return False
