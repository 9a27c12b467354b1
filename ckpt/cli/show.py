"""``ckpt show RUN [--step N] [--tensors [PATTERN]] [--values [PATTERN]] [--alarms] [--files] [--json]``: one step.

Without an option all sections are shown; with some, these only. PATTERN is a shell pattern on a
tensor's name or a value's top-level key.

JSON: ``{"run", "step", "attempt", "format", "world", "features", "written_by", "created_unix_s",
"metrics": {name: number, or "nan", "inf", "-inf"} or null when damaged,
"writer": {...} or null, "layouts": [{"digest", "nbytes", "ranks", "tensors", "meshes": [{"shape",
"ranks"}]}], "tensors": [{"name", "group", "dtype", "shape", "kind", "mesh", "placements", "nbytes",
"rank": null, or the only rank that has it}], "aliases": {name: name}, "values": {key: tree},
"rank_values": [{key: tree}], "alarms": [{"kind", "tensor", "nan", "inf", "ranks": [[first, last]]}],
"files": [{"rank", "group", "name", "nbytes", "encoding"}]}``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import msgspec

from ckpt.cli.output import console, counted, emit_json, nbytes_text, say, step_number, table, when_text
from ckpt.errors import CkptError, printable
from ckpt.format.alarms import ranks_text
from ckpt.format.metrics import json_number
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.reading.alarms import step_alarms
from ckpt.reading.step import StepReader
from ckpt.reading.tree import readable, shortened
from ckpt.run import Run

_LIST_PREVIEW = 8
_RANKS_SHOWN = 8
_METRICS_SHOWN = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the run's root: a path or a URL")
    parser.add_argument("--step", type=step_number, metavar="N", help="the step to show (default: the latest)")
    parser.add_argument("--tensors", nargs="?", const="*", metavar="PATTERN", help="only tensors (of such a name)")
    parser.add_argument("--values", nargs="?", const="*", metavar="PATTERN", help="only values (under such a key)")
    parser.add_argument("--alarms", action="store_true", help="only what looked wrong when the step was saved")
    parser.add_argument("--files", action="store_true", help="only the files of each rank")


def run(arguments: argparse.Namespace) -> int:
    """Show the step."""
    reader = StepReader.open(Run.open(arguments.run), arguments.step)
    document = _facts(reader)
    chosen = arguments.tensors is not None or arguments.values is not None
    chosen = chosen or arguments.alarms or arguments.files
    if arguments.tensors is not None or not chosen:
        document["tensors"] = [row for row in _tensors(reader) if fnmatchcase(row["name"], arguments.tensors or "*")]
        document["aliases"] = reader.aliases()
    if arguments.values is not None or not chosen:
        document.update(_values(reader, arguments.values or "*"))
    if arguments.alarms or not chosen:
        document["alarms"] = _alarms(reader)
    if arguments.files or not chosen:
        document["files"] = _files(reader)
    if arguments.json:
        emit_json(document)
    else:
        _print(document, facts=not chosen)
    return 0


def _facts(reader: StepReader) -> dict[str, Any]:
    commit = reader.commit
    writers = [writer for writer in reader.run.writers() if writer.number == reader.attempt.writer]
    layouts = []
    for ref in commit.layouts:
        layout = reader.layout_boxes(ref.digest).layout
        meshes = [{"shape": mesh.shape, "ranks": mesh.ranks} for mesh in layout.meshes]
        layouts.append({**msgspec.to_builtins(ref), "tensors": len(layout.tensors), "meshes": meshes})
    return {
        "run": reader.run.url,
        "step": commit.step,
        "attempt": commit.attempt,
        "format": commit.format,
        "world": commit.world,
        "features": commit.features,
        "written_by": commit.written_by,
        "created_unix_s": commit.created_unix_s,
        "metrics": _metrics(reader),
        "writer": msgspec.to_builtins(writers[0]) if writers else None,
        "layouts": layouts,
    }


def _metrics(reader: StepReader) -> dict[str, float | str] | None:
    try:
        found = reader.run.metrics(reader.attempt, reader.commit)
    except CkptError:  # `ckpt verify` says what is wrong with them
        return None
    return {name: json_number(value) for name, value in found.items()}


def _tensors(reader: StepReader) -> list[dict[str, Any]]:
    rows = []
    for name, tensor in reader.tensors().items():
        mesh = reader.layout_of_tensor(name).meshes[tensor.mesh].shape
        rows.append(
            {**_form(tensor), "group": tensor.group, "mesh": mesh, "placements": tensor.placements, "rank": None}
        )
    for rank in range(reader.commit.world):
        placed = {"group": "state", "mesh": None, "placements": None, "rank": rank}
        rows.extend({**_form(own), **placed} for own in reader.rank_tensors(rank))
    return rows


def _form(tensor: Any) -> dict[str, Any]:
    nbytes = prod(tensor.shape) * DTYPE_NBYTES.get(tensor.dtype, 0)
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "kind": tensor.kind, "nbytes": nbytes}


def _values(reader: StepReader, pattern: str) -> dict[str, Any]:
    def matching(trees: dict[str, Any]) -> dict[str, Any]:
        return {key: readable(tree) for key, tree in trees.items() if fnmatchcase(key, pattern)}

    ranks = range(reader.commit.world)
    return {
        "values": matching(reader.values(torch_types=False)),
        "rank_values": [matching(reader.rank_values(rank, torch_types=False)) for rank in ranks],
    }


def _alarms(reader: StepReader) -> list[dict[str, Any]]:
    return [
        {"kind": alarm.kind, "tensor": alarm.tensor, "nan": alarm.nan, "inf": alarm.inf, "ranks": alarm.ranks}
        for alarm in step_alarms(reader.run, reader.attempt, reader.commit)
    ]


def _files(reader: StepReader) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rank in range(reader.commit.world):
        for file in reader.part(rank).files:
            facts = {"name": file.name, "nbytes": file.nbytes, "encoding": file.encoding}
            rows.append({"rank": rank, "group": file.group, **facts})
        ref = reader.commit.parts[rank]
        rows.append({"rank": rank, "group": "part", "name": ref.name, "nbytes": ref.nbytes, "encoding": "json"})
    return rows


# -- text ----------------------------------------------------------------------------------


def _print(document: dict[str, Any], *, facts: bool) -> None:
    sections: dict[str, Callable[[dict[str, Any]], None]] = {
        "tensors": _print_tensors,
        "values": _print_values,
        "alarms": _print_alarms,
        "files": _print_files,
    }
    if facts:
        _print_facts(document)
    shown = [name for name in sections if name in document and not (name == "alarms" and facts and not document[name])]
    for i, name in enumerate(shown):
        if i or facts:
            say()
        sections[name](document)


def _print_alarms(document: dict[str, Any]) -> None:
    alarms = document["alarms"]
    if alarms:
        rows = [
            [
                a["kind"],
                a["tensor"],
                str(a["nan"] or ""),
                str(a["inf"] or ""),
                ranks_text(a["ranks"]) if a["ranks"] else "",
            ]
            for a in alarms
        ]
        table(["alarm", "tensor", "NaN", "Inf", "where"], rows, right=("NaN", "Inf"))
    say(counted(len(alarms), "alarm"))


def _print_files(document: dict[str, Any]) -> None:
    rows = [[str(f["rank"]), f["name"], nbytes_text(f["nbytes"]), f["encoding"]] for f in document["files"]]
    table(["rank", "file", "size", "encoding"], rows, right=("rank", "size"))
    say(f"{counted(len(rows), 'file')}, {nbytes_text(sum(f['nbytes'] for f in document['files']))}")


def _print_facts(document: dict[str, Any]) -> None:
    writer = document["writer"]
    lines = [
        ("run", document["run"]),
        ("step", f"{document['step']} ({document['attempt']}), {counted(document['world'], 'rank')}"),
        ("written", f"{when_text(document['created_unix_s'])} by {document['written_by']} ({document['format']})"),
    ]
    if document["metrics"] is None:
        lines.append(("metrics", "damaged"))
    elif document["metrics"]:
        shown = [
            f"{name} {value if isinstance(value, str) else f'{value:.6g}'}"
            for name, value in list(document["metrics"].items())[:_METRICS_SHOWN]
        ]
        more = len(document["metrics"]) - len(shown)
        lines.append(("metrics", ", ".join(shown) + (f" and {more} more" if more else "")))
    if document["features"]:
        lines.append(("features", ", ".join(document["features"])))
    if writer is not None:
        start = "from nothing" if writer["resumed_from"] is None else f"from step {writer['resumed_from']}"
        lines.append(
            (
                "writer",
                f"{writer['number']}: {writer['job']} on {writer['host']} (pid {writer['pid']}), went on {start}",
            )
        )
    for layout in document["layouts"]:
        ranks = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in layout["ranks"])
        lines.append(("layout", f"{layout['digest']}: {counted(layout['tensors'], 'tensor')}, ranks {ranks}"))
    for name, text in lines:
        say(f"{name:<9}{text}")


def _print_tensors(document: dict[str, Any]) -> None:
    rows = [
        [
            t["name"] if t["rank"] is None else f"{t['name']} (rank {t['rank']})",
            t["dtype"] if t["kind"] == "tensor" else f"{t['dtype']} (numpy)",
            str(list(t["shape"])),
            " ".join(t["placements"]) if t["placements"] is not None else "own",
            "x".join(map(str, t["mesh"])) if t["mesh"] is not None else "",
            nbytes_text(t["nbytes"]),
        ]
        for t in document["tensors"]
    ]
    table(["tensor", "dtype", "shape", "placements", "mesh", "size"], rows, right=("size",))
    say(f"{counted(len(rows), 'tensor')}, {nbytes_text(sum(t['nbytes'] for t in document['tensors']))}")
    for other, name in document["aliases"].items():
        say(f"{other} is tied to {name}")


def _print_values(document: dict[str, Any]) -> None:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree("values")
    for key, value in document["values"].items():
        _grow(root, key, value)
    own = document["rank_values"]
    for rank, values in enumerate(own[:_RANKS_SHOWN]):
        if values:
            branch = root.add(Text(f"rank {rank}"))
            for key, value in values.items():
                _grow(branch, key, value)
    if len(own) > _RANKS_SHOWN and any(own):
        root.add(Text(f"... of {len(own)} ranks; --json has all"))
    out = console()
    with out.capture() as captured:
        out.print(root)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _grow(tree: Any, key: str, value: Any) -> None:
    from rich.text import Text

    if isinstance(value, dict) and value:
        branch = tree.add(Text(printable(key)))
        for inner, item in value.items():
            _grow(branch, inner, item)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        branch = tree.add(Text(printable(key)))
        for index, item in enumerate(value[:_LIST_PREVIEW]):
            _grow(branch, f"[{index}]", item)
        if len(value) > _LIST_PREVIEW:
            branch.add(Text(f"... {len(value)} items"))
    else:
        is_reference = isinstance(value, str) and value.startswith("<") and value.endswith(">")
        tree.add(Text(printable(f"{key}: {value if is_reference else shortened(value, 100)}")))
