"""SPEC.md: its example is a run, and a reader written from it alone agrees with ckpt's arithmetic."""

from __future__ import annotations

import re
from itertools import product
from math import prod
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt.format
from ckpt.format import records
from ckpt.format.commit import Attempt, Commit, FileRef, LayoutRef, decode_commit, encode_commit
from ckpt.format.layout import Layout, Mesh, Tensor, check_layout, decode_layout, nesting
from ckpt.format.part import RankTensor, decode_part, part_name
from ckpt.format.safetensors import DTYPE_NBYTES, parse_header
from ckpt.format.values import decode
from ckpt.format.values_decode import _TAGS
from ckpt.format.writer import Writer, decode_writer, encode_writer
from ckpt.plan.boxes import LayoutBoxes
from ckpt.plan.files import file_tables
from ckpt.plan.live import classify
from tests.format import spec_reader as reader

SPEC = (Path(ckpt.format.__file__).parent / "SPEC.md").read_text()


def example_run(root: Path) -> Path:
    """The run of SPEC.md's worked example, from the text of SPEC.md."""
    section = SPEC[SPEC.index("## A step, byte by byte") : SPEC.index("## A reader in ten steps")]
    writer, layout, length, header, payload, part, commit = re.findall(
        r"```(?:json|hex)\n(.*?)\n```", section, re.DOTALL
    )
    folder = root / "step-00000003-w1.1"
    for name in ("writers", "layouts", folder.name):
        (root / name).mkdir()
    (root / "writers" / "000001.json").write_text(writer)
    (root / "layouts" / "2f159220ff4ea2ad6a7acb7302d7b520.json").write_text(layout)
    head = bytes.fromhex(length) + header.encode()
    (folder / "model-00000-of-00001.safetensors").write_bytes(head.ljust(4096, b" ") + bytes.fromhex(payload))
    (folder / "part-00000-of-00001.json").write_text(part)
    (folder / "COMMIT").write_text(commit + "\n")
    return root


def test_the_example_is_a_run(tmp_path):
    """Both readers take the example of SPEC.md, byte by byte."""
    root = example_run(tmp_path)
    step = reader.read_step(root)
    assert step.tensors == {"model.w": ("float32", (2,), bytes.fromhex("0000803f000000c0"))}
    assert step.values == [{"betas": (0.9, 1.0), "epoch": 3, "model": ("module", {"prefix": "model", "extra": {}})}]
    decode_writer((root / "writers" / "000001.json").read_bytes(), "writer")
    folder = root / Attempt(3, 1, 1).folder
    commit = decode_commit((folder / "COMMIT").read_bytes(), "COMMIT")
    layout = decode_layout(
        (root / "layouts" / f"{commit.layouts[0].digest}.json").read_bytes(), commit.layouts[0].digest
    )
    raw = (folder / commit.parts[0].name).read_bytes()
    assert (len(raw), records.digest(raw)) == (commit.parts[0].nbytes, commit.parts[0].digest)
    part = decode_part(raw, "part")
    assert records.encode(part) == raw
    assert {key: decode(node, key) for key, node in part.values.items()}["betas"] == (0.9, 1.0)
    data = (folder / part.files[0].name).read_bytes()
    assert [entry.key for entry in parse_header(data, len(data), "file")[1]] == ["w"]
    assert [entry.key for entry in file_tables(layout, 0)["model"]] == ["w"]


@pytest.mark.parametrize(
    "name", ["writers/000001.json", "layouts/2f159220ff4ea2ad6a7acb7302d7b520.json", "step-00000003-w1.1/COMMIT",
             "step-00000003-w1.1/part-00000-of-00001.json", "step-00000003-w1.1/model-00000-of-00001.safetensors"],
)  # fmt: skip
def test_the_reader_refuses_damage(tmp_path, name):
    """One flipped bit anywhere but in people's text of a writer is refused, whichever object has it."""
    path = example_run(tmp_path) / name
    good = path.read_bytes()
    for position in range(0, len(good), max(1, len(good) // 40)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        try:
            step = reader.read_step(tmp_path)
        except (reader.RefusedError, ValueError, KeyError):
            continue
        assert name.startswith("writers")
        assert step.tensors["model.w"][2] == bytes.fromhex("0000803f000000c0")


def test_the_reader_stands_alone():
    """It proves SPEC.md only as long as it borrows nothing from ckpt."""
    assert reader.__file__ is not None
    assert not re.search(r"^\s*(from|import) (?!__future__)\w*ckpt", Path(reader.__file__).read_text(), re.MULTILINE)


def test_every_tag_and_dtype_is_described():
    """SPEC.md names every tag of typed JSON, every dtype, and every field of every record."""
    from ckpt.format import alarms, commit, hold, layout, metrics, part, writer

    missing = [tag for tag in _TAGS if f'"{tag}"' not in SPEC]
    missing += [d for d in DTYPE_NBYTES if f"`{d}`" not in SPEC and not re.fullmatch(r"u?int[2-6]", d)]
    for kind in (
        writer.Writer, commit.Commit, commit.LayoutRef, commit.FileRef, layout.Mesh, layout.Tensor, layout.Layout,
        part.DataFile, part.PackedChunk, part.RankTensor, part.Part, hold.Hold, metrics.Metrics,
        alarms.Alarm, alarms.Alarms,
    ):  # fmt: skip
        missing += [f for f in kind.__struct_fields__ if not re.search(rf"[`\"\[, ]{f}[`\"\],]", SPEC)]
    assert missing == []


def test_links_of_the_contents():
    """Every link in SPEC.md leads to a heading of SPEC.md."""
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in SPEC.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", SPEC)) <= headings


# ---------------------------------------------------------------- arithmetic, both ways


@st.composite
def layouts(draw):
    """A layout on one mesh, and its rank tensors: any placements that the mesh allows, any owners."""
    side = st.integers(1, 3)
    mesh_shape = tuple(draw(st.lists(side, min_size=1, max_size=3)))
    world = prod(mesh_shape)
    ranks = tuple(draw(st.permutations(range(world))))
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        words = ["R", *(f"S{d}" for d in range(len(shape)))]
        placements = tuple(draw(st.sampled_from(words)) for _ in mesh_shape)
        if len(mesh_shape) == 2 and placements == ("S0", "S0") and mesh_shape[1] > 1 and draw(st.booleans()):
            placements = (f"S0/{mesh_shape[1]}", "S0")
        replicas = prod(side for side, word in zip(mesh_shape, placements, strict=True) if word == "R")
        most = max(1, shape[0]) if shape else 1
        owners = tuple(sorted(draw(st.lists(st.integers(0, replicas - 1), min_size=1, max_size=min(most, replicas)))))
        group = draw(st.sampled_from(["model", "optimizer", "state"]))
        dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))
        tensors.append(Tensor(f"{group}.t{number}", group, dtype, shape, 0, placements, owners))
    layout = Layout("ckpt/1", (Mesh(mesh_shape, ranks),), tuple(tensors), {})
    check_layout(layout, "layout")
    return layout


@given(layouts())
def test_same_arithmetic(layout):
    """For any layout, SPEC.md's boxes and file tables are ckpt's, and tile every tensor exactly once."""
    plain = msgspec.to_builtins(layout)
    own = (RankTensor("state.own", "float32", (3,)),)
    boxes = LayoutBoxes(layout)
    seen: dict[str, list[int]] = {t.name: [0] * prod(t.shape) for t in layout.tensors}
    for tensor, plain_tensor in zip(layout.tensors, plain["tensors"], strict=True):
        placements = tuple(tensor.placements)
        assert sorted(nesting(layout.meshes[0].shape, placements)) == sorted(
            reader.nesting(plain["meshes"][0]["shape"], plain_tensor["placements"])
        )
        for rank in layout.meshes[0].ranks:
            theirs = reader.owned(plain, plain_tensor, rank)
            assert [(box.offsets, box.sizes) for box in boxes.owned(tensor, rank)] == [
                (tuple(offsets), tuple(sizes)) for offsets, sizes in theirs
            ]
            for box in theirs:
                mark(seen[tensor.name], tensor.shape, box)
    assert all(count == 1 for counts in seen.values() for count in counts)
    for rank in layout.meshes[0].ranks:
        tables = file_tables(layout, rank, own)
        part = {"rank": rank, "rank_tensors": msgspec.to_builtins(own)}
        for group in ("model", "optimizer", "state"):
            assert [(e.name, e.box.offsets, e.box.sizes) for e in tables.get(group, [])] == [
                (name, tuple(offsets), tuple(sizes))
                for name, _, _, (offsets, sizes) in reader.file_table(plain, part, group)
            ]


def mark(counts, shape, box):
    for index in product(*(range(offset, offset + size) for offset, size in zip(*box, strict=True))):
        at = 0
        for i, size in zip(index, shape, strict=True):
            at = at * size + i
        counts[at] += 1


@st.composite
def histories(draw):
    """Writers that resumed from anywhere, and their attempts; some of a writer that has no record."""
    resumed = draw(st.lists(st.none() | st.integers(0, 6), min_size=1, max_size=5))
    writers = [Writer("ckpt/1", i + 1, "n", "j", "h", 1, 1, step, 1.0) for i, step in enumerate(resumed)]
    numbers = st.integers(1, len(writers) + 1)
    attempts = st.builds(Attempt, st.integers(0, 6), numbers, st.integers(1, 2))
    return writers, draw(st.lists(attempts, unique=True, max_size=8))


@given(histories())
def test_same_live_steps(tmp_path_factory, history):
    """For any history of writers, SPEC.md's live steps are ckpt's."""
    writers, attempts = history
    root = tmp_path_factory.mktemp("run")
    (root / "writers").mkdir()
    for writer in writers:
        (root / "writers" / f"{writer.number:06d}.json").write_bytes(encode_writer(writer))
    for attempt in attempts:
        (root / attempt.folder).mkdir()
        (root / attempt.folder / "COMMIT").write_bytes(encode_commit(commit_of(attempt)))
    states = classify(writers, attempts)
    live = {a.step: a.folder for a in attempts if states[a][0] == "live"}
    assert {step: folder.name for step, (folder, _) in reader.live_steps(root).items()} == live


def commit_of(attempt: Attempt) -> Commit:
    ref = FileRef(part_name(0, 1), 1, "0" * 32)
    return Commit("ckpt/1", attempt.step, attempt.label, 1, (), "x", 1.0, (LayoutRef("0" * 32, 1, ((0, 0),)),), (ref,))


def test_the_live_example():
    """The worked example of live steps in SPEC.md comes out as its table says."""
    writers = [
        Writer("ckpt/1", n, "n", "j", "h", 1, world, resumed, 1.0)
        for n, world, resumed in ((1, 1, None), (2, 1, 100), (3, 0, 200), (4, 1, 200))
    ]
    committed = [Attempt(s, w, i) for w, steps in {1: (100, 200), 2: (200, 300, 400), 4: (300,)}.items()
                 for i, s in enumerate(steps, 1)]  # fmt: skip
    states = classify(writers, committed)
    live = {(a.step, a.label) for a, (state, _) in states.items() if state == "live"}
    assert live == {(100, "w1.1"), (200, "w2.1"), (300, "w4.1")}
