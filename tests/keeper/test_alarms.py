"""What the keeper finds wrong with a state while it writes it, and what becomes of it over ranks and nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckpt.errors import BadInputError, KeeperError, SaveFailedError
from ckpt.format import records
from ckpt.format.alarms import ALARMS, NOT_FINITE, RANDOM, UNCHANGED, Alarm
from ckpt.format.chunk import CHUNK_NBYTES, chunk_spans
from ckpt.format.layout import encode_layout
from ckpt.keeper import protocol
from ckpt.keeper.alarms import LOOK_NBYTES, Memory, ShardWatch, Sum, Watcher, encode_watch, refuse
from ckpt.keeper.client import KeeperClient, PendingTask
from ckpt.keeper.persist import persist
from ckpt.keeper.protocol import FileTask, LayoutTask, SaveTask, WatchTask
from ckpt.reading.alarms import step_alarms
from ckpt.run import Run
from tests.keeper.rank_process import fill, hand_over, layout_of
from tests.keeper.steps import committed


def watch_of(*files: list[ShardWatch]) -> WatchTask:
    """As a trainer tells it."""
    raw = encode_watch(files)
    return WatchTask(records.digest(raw), raw)


def task_of(
    shards: list[int], watch: WatchTask | None, *, step: int = 1, encode: str = "raw", layout: str = "a" * 32
) -> SaveTask:
    """One file of these shards, without a header."""
    suffix = "safetensors" if encode == "raw" else "pack"
    header = 4096 if encode == "raw" else 0
    file = FileTask("model", f"model-00000-of-00001.{suffix}", 0, header + sum(shards), header, tuple(shards))
    return SaveTask(
        run="", step=step, writer=1, save=step, rank=0, world=1, arena=0, encode=encode, files=(file,), layout=layout,
        rank_tensors=(), values={}, values_digests={}, rank_values={}, watch=watch,
    )  # fmt: skip


def written(run: Run, task: SaveTask, payload: bytes, memory: Memory | None = None) -> Any:
    """The part that comes of it."""
    arena = memoryview(bytearray(bytes(task.files[0].header_nbytes) + payload))
    persist(run, task, arena, [], await_ready=lambda _: None, report=lambda _: None, memory=memory)
    raw = run.store.get(f"step-{task.step:08d}-w1.{task.step}/part-00000-of-00001.json", limit_nbytes=1 << 24)
    return msgspec.json.decode(raw)


@pytest.mark.parametrize("encode", ["raw", "zstd"])
def test_counts_at_every_border(tmp_path: Path, encode: str):
    """On both sides of a chunk's and of a look's border, at both ends, in odd lengths; digests are as ever."""
    big = np.zeros(CHUNK_NBYTES // 4 + 3, "<f4")
    big[[0, LOOK_NBYTES // 4 - 1, CHUNK_NBYTES // 4 - 1]] = np.nan
    big[[LOOK_NBYTES // 4, CHUNK_NBYTES // 4, -1]] = np.inf, -np.inf, np.inf
    small = np.zeros(7, "<u2")
    small[[0, 6]] = 0x7F81, 0xFF80
    ints = np.full(5, 0xFF, "u1")
    shards = [big.view("u1"), small.view("u1"), ints]
    sizes = [len(shard) for shard in shards]
    rows = [ShardWatch("model.big", "float32", False), ShardWatch("model.small", "bfloat16", False),
            ShardWatch("model.ints", "", False)]  # fmt: skip
    payload = b"".join(shard.tobytes() for shard in shards)
    run = Run.open(tmp_path / "run")
    part = written(run, task_of(sizes, watch_of(rows), encode=encode), payload)
    assert part["alarms"] == [
        {"kind": "not finite", "tensor": "model.big", "nan": 3, "inf": 3},
        {"kind": "not finite", "tensor": "model.small", "nan": 1, "inf": 1},
    ]
    digests = [
        records.digest(shard.tobytes()[start : start + n]) for shard in shards for start, n in chunk_spans(len(shard))
    ]
    file = part["files"][0]
    assert (file["chunks"] or [chunk[0] for chunk in file["packed"]]) == digests
    off = written(run, task_of(sizes, None, step=2, encode=encode), payload)
    assert "alarms" not in off
    assert off["files"] == part["files"]


def test_unchanged_since_the_save_of_an_earlier_step(tmp_path: Path):
    """Whole shards only, trained ones only; a step that is saved again is judged as it was before."""
    run, memory = Run.open(tmp_path / "run"), Memory()
    rows = [ShardWatch("w", "float32", True), ShardWatch("w", "float32", True), ShardWatch("v", "", True),
            ShardWatch("buffer", "float32", False)]  # fmt: skip
    watch = watch_of(rows)

    def save(step: int, payload: bytes, **change: Any) -> list[tuple[str, int]]:
        task = msgspec.structs.replace(task_of([8, 8, 4, 4], watch, step=step), **change)
        arena = memoryview(bytearray(4096) + payload)
        watcher = Watcher(task, memory)
        look, start = watcher.of_file(0), 4096
        for shard, nbytes in enumerate(task.files[0].shards):
            look(shard, arena[start : start + nbytes])
            start += nbytes
        return [(alarm.tensor, alarm.nbytes) for alarm in watcher.alarms() if alarm.kind == UNCHANGED]

    first = bytes(range(24))
    assert save(10, first) == []
    assert save(20, first) == [("w", 16), ("v", 4)]
    assert save(20, first) == [("w", 16), ("v", 4)]  # compared with 10, not with itself
    assert save(20, b"\xff" + first[1:]) == [("v", 4)]
    assert save(30, b"\xff" + first[1:]) == [("w", 16), ("v", 4)]
    assert save(40, b"\xff" + first[1:8] + bytes(8) + first[16:]) == [("v", 4)]  # the second of two shards
    assert save(50, first, layout="b" * 32) == []  # other shards of the same names
    assert save(60, first, layout="b" * 32) == [("w", 16), ("v", 4)]
    assert save(20, first) == []  # went on from an earlier step: what was saved later is forgotten
    assert run.attempts() == []


def test_a_watch_of_other_shards_is_refused():
    """A task that says nonsense fails its save, not the keeper."""
    for watch, words in (
        (WatchTask("d", b"\xc1"), "watch: "),
        (watch_of([ShardWatch("w", "float32", True)]), "watch is of other shards"),
        (watch_of([], []), "watch is of other shards"),
    ):
        with pytest.raises(BadInputError, match=words):
            Watcher(task_of([4, 4], watch), Memory())


def layouts(*nbytes: int) -> tuple[LayoutTask, ...]:
    """Layouts of one uint8 tensor ``model.w`` each."""
    return tuple(LayoutTask(*encode_layout(layout_of(1, n)), ((0, 0),)) for n in nbytes)


def test_the_sum_over_ranks():
    """Counts add up; a tensor is unchanged only when every byte of it is; what trainers found goes through."""
    total = Sum()
    total.add(0, [Alarm(NOT_FINITE, "b", nan=1), Alarm(UNCHANGED, "model.w", nbytes=60), Alarm(RANDOM, "rng.torch")])
    total.add(2, [Alarm(NOT_FINITE, "b", nan=2, inf=5), Alarm(NOT_FINITE, "a", inf=1)])
    expected = [
        Alarm(NOT_FINITE, "a", inf=1, ranks=((2, 2),)),
        Alarm(NOT_FINITE, "b", nan=3, inf=5, ranks=((0, 0), (2, 2))),
        Alarm(RANDOM, "rng.torch"),
    ]
    assert list(total.total(layouts(100))) == expected
    total.add(1, [Alarm(UNCHANGED, "model.w", nbytes=40)])
    assert list(total.total(layouts(100))) == [*expected[:2], Alarm(UNCHANGED, "model.w"), expected[2]]
    assert Sum().total(()) == ()


def test_what_is_refused():
    """In one sentence, with three names; what only the trainers can judge is theirs to refuse."""
    refuse([])
    refuse([Alarm(RANDOM, "rng.torch", ranks=((0, 1),))])
    found = [Alarm(NOT_FINITE, f"t{i}", nan=i + 1) for i in range(5)]
    with pytest.raises(SaveFailedError, match=r"t0 \(1 NaN\), t1 \(2 NaN\), t2 \(3 NaN\) and 2 more: NaN or infinite"):
        refuse(found)


def test_a_watch_is_sent_once():
    """As layouts are: again only when it is another one."""
    before: frozenset[str] = frozenset()
    kept: dict[str, bytes] = {}
    sent = []
    one, two = (watch_of([ShardWatch(name, "float32", True)]) for name in "ab")
    for watch in (one, one, None, one, two, one):
        task = task_of([4], watch)
        brief, before = protocol.brief(task, before)
        sent.append(None if brief.watch is None else bool(brief.watch.raw))
        again, kept = protocol.whole(brief, kept)
        assert again == task
    assert sent == [True, False, None, False, True, True]
    lost = msgspec.structs.replace(task_of([4], one), watch=WatchTask(one.digest, b""))
    with pytest.raises(KeeperError, match="without its layouts or watch"):
        protocol.whole(lost, {})


@pytest.mark.parametrize("fails", [False, True])
def test_over_two_nodes(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, fails: bool):
    """The coordinator adds up what another node's part says; both nodes tell their ranks, or fail the save."""
    clients = []
    for rank, job in enumerate(("node-a", "node-b")):
        monkeypatch.setenv("CKPT_JOB", job)
        clients.append(KeeperClient.connect(rank))
    watch = watch_of([ShardWatch("model.w", "float32", True)])
    run = Run.open(url)

    def begin(step: int, fails: bool, *values: float) -> list[PendingTask]:
        pending = []
        for client, value in zip(clients, values, strict=True):
            arena, task = fill(client, url, step, step, world=2, watch=watch, alarms_fail=fails)
            arena.view[4096 : 4096 + 10_000] = np.full(2500, value, "<f4").tobytes()
            pending.append(hand_over(client, task))
        return pending

    def save(step: int, fails: bool, *values: float) -> list[protocol.SaveResult]:
        return [one.wait(60) for one in begin(step, fails, *values)]

    assert [result.alarms for result in save(1, fails, 1.0, 2.0)] == [(), ()]
    assert [result.alarms for result in save(2, fails, 1.0, 3.0)] == [(), ()]  # rank 0's half is as it was
    features = [run.find(step).commit.features for step in (1, 2)]  # type: ignore[union-attr]
    assert features == [(), ("alarms",)]
    assert ALARMS not in run.store.list("step-00000002-w1.2")
    if fails:
        for pending in begin(3, True, 4.0, float("nan")):
            with pytest.raises(SaveFailedError, match=r"model.w \(2500 NaN, rank 1\): NaN or infinite"):
                pending.wait(60)
        assert committed(url) == [1, 2]
        assert run.store.list("step-00000003-w1.3") == ["failed-00000-of-00002.json"]
        assert [result.alarms for result in save(4, True, 4.0, 5.0)] == [(), ()]
    else:
        found = (Alarm(NOT_FINITE, "model.w", nan=2500, ranks=((1, 1),)),)
        assert [result.alarms for result in save(3, False, 4.0, float("nan"))] == [found, found]
        state = run.find(3)
        assert state.commit is not None
        assert step_alarms(run, state.attempt, state.commit) == found
        again = (*found, Alarm(UNCHANGED, "model.w"))
        assert [result.alarms for result in save(4, False, 4.0, float("nan"))] == [again, again]
    for client in clients:
        client.close(done=True)
