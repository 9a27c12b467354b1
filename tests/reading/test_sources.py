"""Where the bytes of a damaged step come from: parity, tiers, copies; and what is said when nothing has them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from ckpt.errors import BadInputError, DamagedError, NotFoundError, StoreError
from ckpt.format.writer import encode_writer
from ckpt.reading.parallel import fetch_all
from ckpt.reading.sources import TOLD_EACH, Repaired, repaired_texts
from ckpt.reading.step import StepReader
from ckpt.reading.tiers import TieredRun, tiered
from ckpt.reading.verify import verify
from ckpt.run import Run
from ckpt.store import LocalStore
from ckpt.testing import FaultyStore, RecordingStore
from ckpt.testing.handmade import HandTensor, filled, write_step

SHAPE = (34, 1 << 20)  # of each rank 17 MiB: two chunks
DATA = random.Random(0).randbytes(34 << 20)
SMALL = {f"s{number:03}": filled((40,), "float32", number) for number in range(60)}


def tensors():
    large = HandTensor("large", "uint8", SHAPE, DATA, mesh=(2,), placements=("S0",))
    return [large, *(HandTensor(name, "float32", (40,), data) for name, data in SMALL.items())]


@pytest.fixture(scope="module", params=["raw", "zstd"])
def pristine(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param) / "run"
    write_step(Run.open(root), 1, tensors(), world=2, encoding=request.param, parity=[(0, 1)])
    return root


@pytest.fixture
def root(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def file_of(root: Path, pattern: str) -> Path:
    (path,) = root.glob(f"step-*/{pattern}")
    return path


def flip(path: Path, *places: int) -> None:
    raw = bytearray(path.read_bytes())
    for place in places:
        raw[place] ^= 1
    path.write_bytes(raw)


def read(run: Run) -> list[Repaired]:
    """Read everything through many threads, compare it, and give what was repaired."""
    reader = StepReader.open(run)
    into = {name: bytearray(len(data)) for name, data in {"large": DATA, **SMALL}.items()}
    fetch_all(reader, [fetch for name, view in into.items() for fetch in reader.fetches(name, None, memoryview(view))])
    assert into.pop("large") == DATA
    assert {name: bytes(view) for name, view in into.items()} == SMALL
    for name, data in SMALL.items():
        one = bytearray(len(data))
        reader.read(name, None, memoryview(one))
        assert bytes(one) == data
    return reader.repaired()


def test_nothing_else_is_read_of_a_healthy_step(root, tmp_path):
    """No parity file, no record of one, no tier."""
    shutil.copytree(root, tmp_path / "tier")
    record, tier = RecordingStore(LocalStore(root)), RecordingStore(LocalStore(tmp_path / "tier"))
    run = TieredRun(record, [Run(tier)])
    attempt = run.find(1).attempt
    tier.done.clear()
    reader = StepReader(run, attempt, run.read_commit(attempt))
    into = memoryview(bytearray(len(DATA)))
    fetch_all(reader, reader.fetches("large", None, into))
    assert not tier.done
    assert not [one for one in record.done if "parity" in one.key]


@pytest.mark.parametrize("place", [0.1, 0.6, 0.999])
def test_one_bit_from_parity(root, place):
    """The chunk that has it, and no other, is rebuilt, whichever of the shard's it is."""
    path = file_of(root, "state-00001-*")
    flip(path, int(place * path.stat().st_size))
    (repaired,) = read(Run.open(root))
    assert repaired.source == "parity-00000-of-00002.xor"
    assert repaired.file.endswith(path.name)


def test_a_lost_file_from_parity(root):
    """Every chunk of it: the large ones, and the small ones that are read together."""
    path = file_of(root, "state-00000-*")
    path.unlink()
    repaired = read(Run.open(root))
    assert {one.source for one in repaired} == {"parity-00000-of-00002.xor"}
    assert len({(one.tensor, one.chunk) for one in repaired}) == len(repaired) > TOLD_EACH
    texts = repaired_texts(repaired)
    assert len(texts) == TOLD_EACH
    assert texts[-1] == f"{repaired[0].file}: {len(repaired) - TOLD_EACH + 1} more chunks: from {repaired[0].source}"


def test_different_places_of_both_files(root):
    """Parity works range by range: two files damaged in different places are both rebuilt."""
    first, second = file_of(root, "state-00000-*"), file_of(root, "state-00001-*")
    flip(first, 100_000)
    flip(second, (16 << 20) + 100_000)
    assert len(read(Run.open(root))) == 2
    report = verify(root)
    assert {problem.repair for problem in report.problems} == {"parity-00000-of-00002.xor"}


def test_the_same_place_of_both_files(root, tmp_path):
    """There parity does not help, which is said; a tier does."""
    for name in ("state-00000-*", "state-00001-*"):
        flip(file_of(root, name), 100_000)
    with pytest.raises(DamagedError, match=r"state-0000.*nothing else has it right \(tried: .*parity-00000-of-00002"):
        read(Run.open(root))
    assert [problem.repair for problem in verify(root).problems] == [None, None]
    tier = tmp_path / "tier"
    shutil.copytree(root, tier)
    for name in ("state-00000-*", "state-00001-*"):
        flip(file_of(tier, name), 100_000, (16 << 20) + 100_000)
    assert {one.source for one in read(tiered(Run.open(root), [tier]))} == {str(tier)}


@pytest.mark.parametrize("errno", ["EIO", "ESTALE"])
def test_what_cannot_be_read(root, errno):
    """A device's error is one chunk's damage where it is the device's, and the store's failure where it is not."""
    path = file_of(root, "state-00001-*")
    faulty = FaultyStore(LocalStore(root), match=path.name, operation="read_into", errno=errno)
    assert {one.source for one in read(Run(faulty))} == {"parity-00000-of-00002.xor"}
    file_of(root, "parity-*.xor").unlink()
    with pytest.raises(
        DamagedError if errno == "EIO" else StoreError, match=f"{path.name}: cannot read.*tried: parity"
    ):
        read(Run(faulty))


def test_tiers_in_their_order(root, tmp_path):
    """The first that is right gives; one that is damaged there too, or is no copy of the step, is told if none is."""
    path = file_of(root, "state-00001-*")
    for name in ("bad", "good"):
        shutil.copytree(root, tmp_path / name)
    flip(file_of(tmp_path / "bad", path.name), 4100)
    shutil.copytree(root, tmp_path / "other")
    shutil.rmtree(next((tmp_path / "other").glob("step-*")))
    write_step(Run.open(tmp_path / "other"), 1, [HandTensor("large", "uint8", (1,), b"a")])
    flip(path, 4100)
    file_of(root, "parity-*.xor").unlink()
    file_of(tmp_path / "bad", "parity-*.xor").unlink()
    tiers = [tmp_path / name for name in ("nothing", "other", "bad")]
    with pytest.raises(DamagedError) as raised:
        read(tiered(Run.open(root), tiers))
    for said in (
        "other: its COMMIT of step-00000001-w1.1 is another one",
        "nothing: has no step",
        "bad/step-00000001",
    ):
        assert said in str(raised.value)
    assert {one.source for one in read(tiered(Run.open(root), [*tiers, tmp_path / "good"]))} == {str(tmp_path / "good")}


def test_records_from_a_tier(root, tmp_path):
    """Part, layout and COMMIT, each of which a load cannot do without."""
    tier = tmp_path / "tier"
    shutil.copytree(root, tier)
    layout = next((root / "layouts").iterdir())
    for path in (file_of(root, "part-00000-*"), file_of(root, "COMMIT"), layout):
        flip(path, 20)
    with pytest.raises(DamagedError, match="COMMIT: torn or altered"):
        StepReader.open(Run.open(root), 1)
    repaired = read(tiered(Run.open(root), [tier]))
    assert {one.file.rpartition("/")[2].partition(".")[0] for one in repaired} == {
        "COMMIT", "part-00000-of-00002", layout.stem,
    }  # fmt: skip
    assert {one.source for one in repaired} == {str(tier)}


def test_a_commit_of_another_run(root, tmp_path):
    """A tier's COMMIT counts only when its writer is this run's."""
    shutil.copytree(root, tmp_path / "tier")
    other = msgspec.structs.replace(Run.open(root).writer(1), nonce="another")
    (tmp_path / "tier" / "writers" / "000001.json").write_bytes(encode_writer(other))
    file_of(root, "COMMIT").unlink()
    with pytest.raises(NotFoundError):
        StepReader.open(tiered(Run.open(root), [tmp_path / "tier"]))
    file_of(tmp_path / "tier", "COMMIT").replace(file_of(root, "part-00000-*").with_name("COMMIT"))
    flip(file_of(root, "COMMIT"), 3)
    with pytest.raises(DamagedError, match=r"COMMIT: torn.*its writer 1 is another one, of another run"):
        StepReader.open(tiered(Run.open(root), [tmp_path / "tier"]), 1)


def test_tiers_are_a_list(root):
    """One root alone would be taken letter by letter; the run itself is no tier of its own."""
    with pytest.raises(BadInputError, match="give a list of roots"):
        tiered(Run.open(root), str(root))
    run = Run.open(root)
    assert tiered(run, [root]) is run


def test_a_wrong_size(root):
    """A file that is longer is not this save's, though its chunks are: with parity it is told, without it refused."""
    path = file_of(root, "state-00001-*")
    path.write_bytes(path.read_bytes() + b"1")
    assert [(one.file.endswith(path.name), one.tensor) for one in read(Run.open(root))] == [(True, None)]
    file_of(root, "parity-*.json").unlink()
    with pytest.raises(DamagedError, match=rf"{path.name}: \d+ bytes, its part says \d+; .*tried: parity: .*missing"):
        read(Run.open(root))


def test_parity_itself(root):
    """verify reads it, names it, and says that it can be made anew."""
    path = file_of(root, "parity-*.xor")
    flip(path, 3)
    (problem,) = verify(root).problems
    assert problem.file.endswith(path.name)
    assert (problem.chunk, problem.repair) == (0, "the data files it is made of")
    assert "its record says" in problem.what
    assert read(Run.open(root)) == []
