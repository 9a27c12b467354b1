from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from ckpt.errors import BadInputError, DamagedError, NotFoundError, UnsupportedFormatError
from ckpt.format import records
from ckpt.format.commit import COMMIT, HF_INDEX, FileRef, LayoutRef
from ckpt.format.layout import decode_layout, layout_key
from ckpt.format.part import decode_part
from ckpt.format.values import ModuleNode
from ckpt.reading.verify import verify, verify_all
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, RankOwn, filled, write_step

WORLD = 2


@pytest.fixture
def run(tmp_path):
    return Run.open(tmp_path / "run")


def tensors(seed=0):
    return [
        HandTensor("model.w", "float32", (64, 33), filled((64, 33), "float32", seed), "model", (2,), ("S0",)),
        HandTensor("model.b", "bfloat16", (33,), filled((33,), "bfloat16", seed), "model", (2,), ("S0",)),
        HandTensor("optimizer.state.exp_avg.w", "float32", (64, 33), bytes(64 * 33 * 4), "optimizer", (2,), ("S0",)),
        HandTensor("scale", "float8_e8m0fnu", (3,), filled((3,), "float8_e8m0fnu", seed)),
    ]


def write(run, step, seed=0, **options):
    own = [RankOwn({"seed": r}, (HandTensor("rng", "uint8", (9,), bytes([r]) * 9),)) for r in range(WORLD)]
    values = {"epoch": step, "model": ModuleNode("model", {})}
    return write_step(run, step, tensors(seed), world=WORLD, own=own, values=values, **options)


def path_of(run, attempt, name):
    return Path(run.url) / run.key(attempt, name)


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_a_good_step(run, encoding):
    """A step as it was written has no problem, and every file of it was read."""
    attempt = write(run, 10, encoding=encoding)
    seen = []
    report = verify(run, progress=lambda done, total: seen.append((done, total)))
    folder = [path for path in (Path(run.url) / attempt.folder).iterdir() if path.name != COMMIT]
    layouts = list((Path(run.url) / "layouts").iterdir())
    assert (report.ok, report.problems, report.notes) == (True, (), ())
    assert (report.step, report.attempt, report.tensors) == (10, "w1.1", 4 + WORLD)
    assert report.files == len(folder) + len(layouts)
    assert report.bytes_read == sum(path.stat().st_size for path in folder + layouts)
    assert seen[-1][0] == seen[-1][1]


def damaged_file(run, attempt, kind, encoding):
    """Damage one thing of a step; the key that must be named."""
    suffix = "safetensors" if encoding == "raw" else "pack"
    model = path_of(run, attempt, f"model-00000-of-00002.{suffix}")
    optimizer = path_of(run, attempt, f"optimizer-00001-of-00002.{suffix}")
    part = path_of(run, attempt, "part-00001-of-00002.json")
    layout = next((Path(run.url) / "layouts").iterdir())
    named = model
    if kind == "flip payload":
        flip(model, -5)
    elif kind == "flip zeros":
        named = optimizer
        flip(optimizer, -1)
    elif kind == "flip first byte":
        flip(model, 0)
    elif kind == "flip header":
        flip(model, 40)
    elif kind == "flip part":
        named = part
        flip(part, 50)
    elif kind == "flip COMMIT":
        named = path_of(run, attempt, COMMIT)
        flip(named, 30)
    elif kind == "flip COMMIT digest":
        named = path_of(run, attempt, COMMIT)
        flip(named, -3)
    elif kind == "flip layout":
        named = layout
        flip(layout, 30)
    elif kind == "cut":
        model.write_bytes(model.read_bytes()[:-1])
    elif kind == "cut to nothing":
        model.write_bytes(b"")
    elif kind == "cut COMMIT":
        named = path_of(run, attempt, COMMIT)
        named.write_bytes(named.read_bytes()[:-1])
    elif kind == "cut part":
        named = part
        part.write_bytes(b"")
    elif kind == "extend":
        model.write_bytes(model.read_bytes() + b"\0")
    elif kind == "delete":
        model.unlink()
    elif kind == "delete part":
        named = part
        part.unlink()
    elif kind == "delete layout":
        named = layout
        layout.unlink()
    elif kind == "swap":
        other = path_of(run, attempt, f"model-00001-of-00002.{suffix}")
        mine, theirs = model.read_bytes(), other.read_bytes()
        model.write_bytes(theirs)
        other.write_bytes(mine)
    elif kind == "step before":
        shutil.copy(path_of(run, run.attempts()[0], model.name), model)
    elif kind == "part of step before":
        named = part
        shutil.copy(path_of(run, run.attempts()[0], part.name), part)
    elif kind == "stray shard":
        named = model.with_name(f"model-00002-of-00003.{suffix}")
        shutil.copy(model, named)
    return str(named.relative_to(run.url))


KINDS = [
    "flip payload", "flip zeros", "flip first byte", "flip header", "flip part", "flip COMMIT", "flip COMMIT digest",
    "flip layout", "cut", "cut to nothing", "cut COMMIT", "cut part", "extend", "delete", "delete part",
    "delete layout", "swap", "step before", "part of step before", "stray shard",
]  # fmt: skip


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_and_named(run, kind, encoding):
    """Each kind of damage to the latest step is a problem that names the file, and the step before stays good."""
    write(run, 10, seed=1, encoding=encoding)
    attempt = write(run, 20, seed=2, encoding=encoding)
    if kind.endswith("layout"):
        shutil.rmtree(Path(run.url) / run.attempts()[0].folder)
    named = damaged_file(run, attempt, kind, encoding)
    report = verify(Run.open(run.url))
    assert not report.ok
    assert named in {problem.file for problem in report.problems}
    assert {p.file for p in report.problems} <= {named, named.replace("00000-of", "00001-of")}
    assert not verify(Run.open(run.url), 20).ok
    if not kind.endswith("layout"):
        assert verify(Run.open(run.url), 10).ok


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_no_bit_flips_unseen(run, encoding):
    """A flipped bit anywhere in any file of a step is found, in the file where it is."""
    attempt = write(run, 10, encoding=encoding)
    folder = Path(run.url) / attempt.folder
    for path in [*folder.iterdir(), *(Path(run.url) / "layouts").iterdir()]:
        size = path.stat().st_size
        for at in sorted({0, 1, 7, 8, 9, size // 2, size - 2, size - 1, *range(11, size, max(1, size // 12))}):
            if at >= size:
                continue
            flip(path, at, at % 8)
            report = verify(Run.open(run.url))
            assert [p.file for p in report.problems][:1] == [str(path.relative_to(run.url))], (path, at)
            flip(path, at, at % 8)
    assert verify(run).ok


def test_every_problem_is_listed(run):
    """Three damaged files and a missing one give all their problems in one report, with tensor and chunk."""
    attempt = write(run, 10)
    flip(path_of(run, attempt, "model-00000-of-00002.safetensors"), -3)
    flip(path_of(run, attempt, "model-00001-of-00002.safetensors"), 4096)
    flip(path_of(run, attempt, "state-00001-of-00002.safetensors"), -1)
    path_of(run, attempt, "optimizer-00000-of-00002.safetensors").unlink()
    problems = [(p.file.partition("/")[2], p.tensor, p.chunk) for p in verify(run).problems]
    assert problems == [
        ("model-00000-of-00002.safetensors", "model.b[0:17]", 0),
        ("optimizer-00000-of-00002.safetensors", None, None),
        ("model-00001-of-00002.safetensors", "model.w[32:64,0:33]", 0),
        ("state-00001-of-00002.safetensors", "rng", 0),
    ]


def test_chunks_after_a_cut_are_named(run, monkeypatch):
    """Of a file cut in the middle the chunks before the cut are fine, and each one behind it is named."""
    for module in ("ckpt.format.chunk", "ckpt.reading.shards", "ckpt.reading.spans", "ckpt.reading.verify_files"):
        monkeypatch.setattr(f"{module}.CHUNK_NBYTES", 64)
    attempt = write_step(run, 1, [HandTensor("x", "uint8", (4, 64), bytes(range(256)))])
    path = path_of(run, attempt, "state-00000-of-00001.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    problems = verify(run).problems
    assert [(p.tensor, p.chunk) for p in problems] == [(None, None), ("x", 2), ("x", 3)]
    assert problems[0].what == f"{path.stat().st_size} bytes, its part says {path.stat().st_size + 100}"


def test_other_files_are_notes(run):
    """A file that nobody takes for a part of the step is a note, not damage."""
    attempt = write(run, 10)
    path_of(run, attempt, "config.json").write_text("{}")
    report = verify(run)
    assert report.ok
    assert report.notes == (f"{attempt.folder}/config.json: not a file of this step, readers ignore it",)


def test_all_steps(run):
    """--all verifies every committed step, live or not, and leaves out what was never committed."""
    write(run, 10)
    write(run, 20)
    run.open_writer(job="again", world=WORLD, resumed_from=10)
    attempt = write(run, 20)
    write(run, 30, commit=False)
    flip(path_of(run, attempt, "part-00000-of-00002.json"), 9)
    reports = list(verify_all(run))
    assert [(r.step, r.attempt, r.ok) for r in reports] == [(10, "w1.1", True), (20, "w1.2", True), (20, "w2.1", False)]


def test_what_cannot_be_asked(run, tmp_path):
    """No run, no such step and nonsense are errors, not reports."""
    with pytest.raises(NotFoundError):
        verify(run)
    write(run, 10)
    with pytest.raises(NotFoundError, match="no live step 11; live steps: 10"):
        verify(run, 11)
    with pytest.raises(BadInputError, match="expected a step number or 'latest'"):
        verify(run, "newest")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(BadInputError, match="not a ckpt run"):
        verify(tmp_path / "other")


def test_an_unreadable_writer_record_is_an_error(run):
    """Without all writers nobody can say which step is live."""
    write(run, 10)
    (Path(run.url) / "writers" / "000001.json").write_bytes(b"{")
    with pytest.raises(DamagedError, match=r"writers/000001\.json"):
        verify(run)


# -- forged steps: every digest is right, what they pin is not -------------------------------------


def forge(run, attempt, *, part=None, layout=None, commit=None):
    """Change rank 0's part, the layout or the COMMIT of a step, and pin the change."""
    record = run.read_commit(attempt)
    if layout is not None:
        old = run.layout(record.layouts[0].digest)
        raw = records.encode(layout(old))  # past the checks of encode_layout
        digest = records.digest(raw)
        run.store.create(layout_key(digest), raw)
        record = msgspec.structs.replace(record, layouts=(LayoutRef(digest, len(raw), record.layouts[0].ranks),))
    refs = []
    for rank, ref in enumerate(record.parts):
        path = path_of(run, attempt, ref.name)
        changed = decode_part(path.read_bytes(), ref.name)
        changed = msgspec.structs.replace(changed, layout=record.layouts[0].digest)
        if part is not None and rank == 0:
            changed = part(changed)
        raw = records.encode(changed)
        path.write_bytes(raw)
        refs.append(FileRef(ref.name, len(raw), records.digest(raw)))
    record = msgspec.structs.replace(record, parts=tuple(refs))
    line = records.encode(commit(record) if commit else record)
    path_of(run, attempt, COMMIT).write_bytes(line + b"\n" + records.digest(line).encode() + b"\n")
    return Run.open(run.url)


def replace_file(part, **changes):
    return msgspec.structs.replace(part, files=(msgspec.structs.replace(part.files[0], **changes), *part.files[1:]))


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "model-00001-of-00002.safetensors", ""])
def test_a_name_is_never_a_path(run, name):
    """A part that names another file than its own is refused before anything is opened."""
    attempt = write(run, 10)
    report = verify(forge(run, attempt, part=lambda part: replace_file(part, name=name)))
    assert [p.file for p in report.problems] == [f"{attempt.folder}/part-00000-of-00002.json"]
    assert f"the file {name!r}" in report.problems[0].what


def test_absent_digests_are_not_ok(run):
    """A part without its digests is damaged, not unchecked."""
    attempt = write(run, 10)
    report = verify(forge(run, attempt, part=lambda part: replace_file(part, chunks=())))
    assert [p.file for p in report.problems] == [f"{attempt.folder}/part-00000-of-00002.json"]


def test_a_digest_too_few_is_not_ok(run):
    """A part that has one digest less than the layout makes chunks is damaged."""
    attempt = write(run, 10)
    report = verify(forge(run, attempt, part=lambda part: replace_file(part, chunks=part.files[0].chunks[:-1])))
    assert [p.what for p in report.problems] == [
        "1 chunk digests for model-00000-of-00002.safetensors, its layout makes 2"
    ]


@pytest.mark.parametrize("change", [{"offset": 1 << 60}, {"nbytes": 10 << 30}, {"offset": -5}, {"encoding": "lz77"}])
def test_packs_that_lie(run, change):
    """A pack's chunk outside of its file, of endless size or of unknown encoding is refused with the part."""
    attempt = write(run, 10, encoding="zstd")

    def lie(part):
        packed = part.files[0].packed
        return replace_file(part, packed=(msgspec.structs.replace(packed[0], **change), *packed[1:]))

    report = verify(forge(run, attempt, part=lie))
    assert [p.file for p in report.problems] == [f"{attempt.folder}/part-00000-of-00002.json"]


def test_frames_that_lie(run):
    """A zstd frame that claims 10 GiB is one problem of its chunk, and nothing is allocated for it."""
    attempt = write(run, 10, encoding="zstd")
    part = decode_part(path_of(run, attempt, "part-00000-of-00002.json").read_bytes(), "part")
    optimizer = next(file for file in part.files if file.group == "optimizer")
    path = path_of(run, attempt, optimizer.name)
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (10 << 30).to_bytes(8, "little")
    path.write_bytes(bomb + path.read_bytes()[len(bomb) :])
    (problem,) = verify(run).problems
    assert (problem.tensor, problem.chunk) == ("optimizer.state.exp_avg.w[0:32,0:33]", 0)
    assert str(10 << 30) in problem.what


def change_tensor(layout, wanted, **changes):
    changed = [msgspec.structs.replace(t, **changes) if t.name == wanted else t for t in layout.tensors]
    return msgspec.structs.replace(layout, tensors=tuple(changed))


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("model.w", {"owners": ()}, "0 ways in which its bytes are owned"),
        ("model.w", {"owners": (7,)}, "an owner that is no replica"),
        ("model.w", {"placements": ("S9",)}, "the placements ['S9']"),
        ("model.w", {"mesh": 5}, "a mesh that is not there"),
        ("model.w", {"dtype": "float33"}, "the dtype 'float33'"),
        ("model.w", {"placements": ("R",)}, "its layout makes"),
        ("model.b", {"name": "model.c"}, "c[0:17]: in the layout, not in the header"),
    ],
)
def test_layouts_that_do_not_add_up(run, name, changes, what):
    """A layout whose shards do not make up a tensor, or are not those of the files, is a problem that says so."""
    attempt = write(run, 10)
    report = verify(forge(run, attempt, layout=lambda layout: change_tensor(layout, name, **changes)))
    assert what in " ".join(str(problem) for problem in report.problems)


def test_ranks_of_two_layouts(run):
    """A layout may only place tensors on ranks that have it."""
    stages = [
        HandTensor("model.a", "uint8", (4,), b"aaaa", "model", (2,), ("S0",), ranks=(0, 1)),
        HandTensor("model.b", "uint8", (4,), b"bbbb", "model", (2,), ("S0",), ranks=(2, 3)),
    ]
    attempt = write_step(run, 10, stages, world=4)
    assert verify(run).ok

    def moved(layout):
        mesh = msgspec.structs.replace(layout.meshes[0], ranks=(1, 2))
        return msgspec.structs.replace(layout, meshes=(mesh,))

    record = run.read_commit(attempt)
    raw = records.encode(moved(run.layout(record.layouts[0].digest)))
    run.store.create(layout_key(records.digest(raw)), raw)
    refs = (LayoutRef(records.digest(raw), len(raw), record.layouts[0].ranks), record.layouts[1])
    line = records.encode(msgspec.structs.replace(record, layouts=refs))
    path_of(run, attempt, COMMIT).write_bytes(line + b"\n" + records.digest(line).encode() + b"\n")
    problems = verify(Run.open(run.url)).problems
    assert "rank 2 in its mesh, but in none of the layouts that own it" in " ".join(map(str, problems))


def test_values_that_are_not_what_their_digest_says(run):
    """A value that was changed, that differs between ranks, or has no meaning is named."""
    attempt = write(run, 10)

    def change(part):
        return msgspec.structs.replace(part, values={**part.values, "epoch": 11}, rank_values={"seed": {"t": "lambda"}})

    report = verify(forge(run, attempt, part=change))
    assert [p.what.partition(":")[0] for p in report.problems] == ["value seed", "value epoch"]


def test_hf_index(run):
    """The Hugging Face index must name exactly the model's tensors, in the files that have them."""
    plain = [HandTensor(f"model.{n}", "float32", (4,), filled((4,), "float32", n), "model") for n in range(4)]
    attempt = write_step(run, 10, plain, world=2)
    assert verify(run).ok
    path = path_of(run, attempt, HF_INDEX)
    index = json.loads(path.read_bytes())
    weights = dict(index["weight_map"])
    weights["9"] = weights.pop("0")
    weights["1"] = next(file for file in set(index["weight_map"].values()) if file != weights["1"])
    raw = json.dumps({**index, "weight_map": weights}).encode()
    path.write_bytes(raw)
    pin = (FileRef(HF_INDEX, len(raw), records.digest(raw)),)
    report = verify(forge(run, attempt, commit=lambda record: msgspec.structs.replace(record, files=pin)))
    said = [(p.tensor, p.what.partition(" ")[0]) for p in report.problems]
    assert said == [("0", "is"), ("1", "points"), ("9", "points")]


def test_a_newer_version_is_refused(run):
    """A step of an unknown feature is exit code 5, with the version that wrote it; older steps can be asked for."""
    write(run, 10)
    attempt = write(run, 20)
    forged = forge(run, attempt, commit=lambda record: msgspec.structs.replace(record, features=("sparse",)))
    with pytest.raises(UnsupportedFormatError, match=r"unknown feature sparse; it was written by ckpt 0\.1\.0"):
        verify(forged)
    assert verify(forged, 10).ok
    assert [report.ok for report in verify_all(forged)] == [True, False]


def test_layouts_are_read_as_they_are(run):
    """The layout that a step pins is the one that decodes to its tensors."""
    attempt = write(run, 10)
    ref = run.read_commit(attempt).layouts[0]
    raw = (Path(run.url) / layout_key(ref.digest)).read_bytes()
    assert [t.name for t in decode_layout(raw, ref.digest).tensors] == [t.name for t in tensors()]
