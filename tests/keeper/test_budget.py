"""How much memory there is: what the kernel's files say, in whatever container; and saves that may not have more."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.errors import KeeperError, StoreError
from ckpt.keeper import memory
from ckpt.keeper.client import KeeperClient, statuses
from ckpt.keeper.memory import Available, arena_nbytes, available_nbytes, check_budget
from ckpt.testing import store_env
from tests.keeper.conftest import ROOT, Trainer, TrainerError, wait_for
from tests.keeper.rank_process import payload, stage
from tests.keeper.steps import check_step, committed, folders

MIB = 1 << 20
V1 = "35 31 0:32 {root} {point} rw,relatime shared:9 - cgroup cgroup rw,memory"
V2 = "41 31 0:38 {root} {point} rw,relatime - cgroup2 cgroup2 rw,nsdelegate"


class Kernel:
    """A /proc and cgroup file systems made of plain files."""

    def __init__(self, folder: Path, *, node_kib: int = 1 << 30) -> None:
        self.proc = folder / "proc"
        self.cgroups = folder / "cgroup fs"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {node_kib} kB\n")

    def is_in(self, path: str, mount: str, root: str = "/", *, number: str = "0", controllers: str = "") -> None:
        """This process is in the group ``path``; ``root`` of its hierarchy is mounted."""
        point = str(self.cgroups).replace(" ", "\\040")
        other = V1.format(root="/elsewhere", point="/nowhere").replace("rw,memory", "rw,cpu")
        (self.proc / "self" / "mountinfo").write_text(
            f"1 0 - nonsense\n{other}\n{mount.format(root=root, point=point)}\n"
        )
        (self.proc / "self" / "cgroup").write_text(f"5:cpu:/elsewhere\n{number}:{controllers}:{path}\n")

    def group(self, path: str, stat: str = "", **files: object) -> Path:
        """A group's folder; ``memory_max=7`` is memory.max."""
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("memory_", "memory.")).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(stat)
        return folder

    def available(self) -> Available:
        return available_nbytes(str(self.proc))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_the_node(kernel: Kernel):
    """Without cgroups it is what the node has."""
    assert kernel.available() == Available(1 << 40, "MemAvailable of the node")


def test_a_system_that_says_nothing(tmp_path: Path):
    """Then nothing limits it, and it says so."""
    assert available_nbytes(str(tmp_path)) == Available(1 << 63, "no limit is known")


def test_this_machine():
    """More than nothing, and not more than the memory there is."""
    found = available_nbytes()
    assert 0 < found.nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.by


def test_the_tightest_group_counts(kernel: Kernel):
    """Every group above counts, and the message names the file that sets the limit."""
    kernel.is_in("/job/worker", V2)
    kernel.group("job/worker", memory_max="max", memory_high="max", memory_current=70)
    job = kernel.group("job", memory_max=1000, memory_high="max", memory_current=400)
    kernel.group("")
    assert kernel.available() == Available(600, f"{job}/memory.max is 1,000")
    worker = kernel.group("job/worker", memory_max=500, memory_high=300, memory_current=70)
    assert kernel.available() == Available(230, f"{worker}/memory.high is 300")
    kernel.group("job/worker", memory_max=500, memory_current=600, memory_high="max")
    assert kernel.available().nbytes == 0


def test_page_cache_is_not_in_the_way(kernel: Kernel):
    """What the kernel takes back first does not count as used: inactive pages, and half of the active ones."""
    kernel.is_in("/job", V2)
    kernel.group("job", "anon 100\ninactive_file 300\nactive_file 200\nshmem 7\n", memory_max=1000, memory_current=900)
    assert kernel.available().nbytes == 1000 - 900 + 300 + 100


def test_version_one(kernel: Kernel):
    """Its own names; pages of groups below count too, and so does the limit of a group above that cannot be seen."""
    kernel.is_in("/docker/abc", V1, "/docker/abc", number="4", controllers="memory,hugetlb")
    stat = "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 0\nhierarchical_memory_limit {}\n"
    limits = {"memory_limit_in_bytes": 1000, "memory_usage_in_bytes": 900}
    here = kernel.group("", stat.format(9223372036854771712), **limits)
    assert kernel.available() == Available(400, f"{here}/memory.limit_in_bytes is 1,000")
    kernel.group("", stat.format(800), **limits)
    assert kernel.available() == Available(200, f"hierarchical_memory_limit in {here}/memory.stat is 800")


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/", "/"),  # a container with a cgroup namespace
        ("/kube/pod/box", "/kube/pod/box"),  # one without
        ("/../outside", "/"),  # moved to another place after the namespace was made
        ("/kube/pod/box", "/other"),  # mounted by someone with other names
        ("/gone/long/ago", "/"),  # not to be seen from here
    ],
)
def test_containers(kernel: Kernel, path: str, root: str):
    """Whatever names a container sees, what is mounted there is looked at."""
    kernel.is_in(path, V2, root)
    here = kernel.group("", memory_max=1000, memory_current=1)
    assert kernel.available() == Available(999, f"{here}/memory.max is 1,000")


def test_a_hierarchy_without_the_memory_controller(kernel: Kernel):
    """Then the node counts: a mixed system has a version 2 hierarchy that counts nothing."""
    kernel.is_in("/", V2)
    kernel.group("")
    assert kernel.available().by == "MemAvailable of the node"


def test_the_check_before_training(kernel: Kernel):
    """One sentence: what is needed, what is allowed and by whom, what can be done."""
    kernel.is_in("/", V2)
    here = kernel.group("", memory_max=1000, memory_current=0)
    arguments = {"what": "2 snapshots of 3 ranks", "proc": str(kernel.proc)}
    check_budget(1000, 1000, **arguments)
    check_budget(1500, None, held_nbytes=500, **arguments)
    check_budget(900, None, held_nbytes=1000, promised_nbytes=1000, **arguments)
    with pytest.raises(KeeperError) as caught:
        check_budget(1001, 999, **arguments)
    assert str(caught.value) == (
        "no memory for 2 snapshots of 3 ranks: it needs arenas of 1,001 bytes in all on this node, budget_bytes allows "
        "999; take snapshots=1, run fewer ranks on a node, save less, or raise budget_bytes"
    )
    with pytest.raises(KeeperError) as caught:
        check_budget(1001, None, snapshots=1, **arguments)
    assert str(caught.value) == (
        f"no memory for 2 snapshots of 3 ranks: it needs 1,001 bytes more, 1,000 are available ({here}/memory.max is "
        "1,000); run fewer ranks on a node, save less, or give the job more memory"
    )
    assert [arena_nbytes(n) for n in (0, 1, 2 * MIB, 2 * MIB + 1)] == [2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB]


# -- saves ---------------------------------------------------------------------------------


def test_a_budget_too_small(folder: Path, url: str):
    """The save fails in words before a byte is written, the process goes on, and a smaller one becomes a step."""
    with KeeperClient.connect(0) as client:
        match = r"snapshot of rank 0: it needs arenas of 10,485,760 bytes .* budget_bytes allows 5,000,000; take snaps"
        with pytest.raises(KeeperError, match=match):
            stage(client, url, 1, 1, nbytes=9 * MIB, budget_bytes=5_000_000)
        assert folders(url) == []
        assert statuses()[0].arenas == ()
        stage(client, url, 2, 2, nbytes=1 * MIB, budget_bytes=5_000_000).wait(30)
    check_step(url, 2)


def test_the_ranks_of_a_node_share_a_budget(trainers: Callable[..., Trainer], url: str):
    """The rank that comes too late is told; it gives up, and the save of all fails with its reason."""
    ranks = [trainers(rank) for rank in range(2)]
    ranks[0].hand_over(1, world=2, nbytes=3 * MIB, budget_bytes=7_000_000, snapshots=1)
    with pytest.raises(TrainerError, match="no memory for the snapshot of rank 1") as refused:
        ranks[1].hand_over(1, world=2, nbytes=3 * MIB, budget_bytes=7_000_000, snapshots=1)
    ranks[1].do("abandon", run=url, step=1, save=1, world=2, message=str(refused.value))
    with pytest.raises(TrainerError, match=r"rank 1: .*budget_bytes allows 7,000,000"):
        ranks[0].wait(1)
    wait_for(lambda: folders(url) == [], "nothing is left of it")
    for rank in ranks:
        rank.hand_over(2, world=2, nbytes=1 * MIB, budget_bytes=7_000_000, snapshots=1)
    for rank in ranks:
        rank.wait(2)
    check_step(url, 2, world=2)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keepers write no part until the file that this gives is there."""
    release = tmp_path / "go"
    spec = {"wrap": "blocking", "program": "keeper", "match": "*/part-*", "operation": "create", "release": release}
    for name, value in store_env(spec).items():
        monkeypatch.setenv(name, value)
    yield release
    release.touch()


def test_one_snapshot_waits_until_the_one_before_is_durable(folder: Path, url: str, held: Path):
    """With ``snapshots=1`` there is one arena, and the second save is held up by the first one's storage."""
    with KeeperClient.connect(0) as client:
        first = stage(client, url, 1, 1, snapshots=1)
        with pytest.raises(TimeoutError, match=r"the arena of rank 0 is still being written after 0\.1 s"):
            client.arena(10_000, url, 0.1, snapshots=1)
        second: list[object] = []
        thread = threading.Thread(target=lambda: second.append(stage(client, url, 2, 2, snapshots=1)))
        thread.start()
        wait_for(lambda: statuses()[0].saves[0].ranks[0].nbytes_written >= 10_000, "the first one has been written")
        assert (second, first.done, len(statuses()[0].arenas)) == ([], False, 1)
        held.touch()
        thread.join(30)
        second[0].wait(30)
        assert first.wait(30).step == 1
        assert len(statuses()[0].arenas) == 1
    for step in (1, 2):
        check_step(url, step)


def maps_of_arenas() -> set[str]:
    """The arenas that this process has mapped: lines of the kernel without addresses, each with an inode of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition(" ")[2] for line in lines if "memfd:ckpt-rank" in line}


def test_from_two_snapshots_to_one_and_back(folder: Path, url: str):
    """The memory of the arena that is too many is given back on both sides."""
    with KeeperClient.connect(0) as client:
        before = maps_of_arenas()
        for step in (1, 2):
            stage(client, url, step, step).wait(30)
        assert (len(statuses()[0].arenas), len(maps_of_arenas() - before)) == (2, 2)
        for step in (3, 4):
            stage(client, url, step, step, snapshots=1).wait(30)
            assert (len(statuses()[0].arenas), len(maps_of_arenas() - before)) == (1, 1)
        for step in (5, 6):
            stage(client, url, step, step).wait(30)
        assert (len(statuses()[0].arenas), len(maps_of_arenas() - before)) == (2, 2)
    assert committed(url) == [1, 2, 3, 4, 5, 6]


def test_warming_one_snapshot(folder: Path, url: str):
    """One arena is touched, and the save takes it."""
    with KeeperClient.connect(0) as client:
        client.warm(8 * MIB, url, snapshots=1, budget_bytes=9 * MIB)
        wait_for(lambda: client.held_nbytes(url) >= 8 * MIB, "it is touched")
        wait_for(lambda: [a.state for a in statuses()[0].arenas] == ["free"], "it is given back")
        stage(client, url, 1, 1, nbytes=7 * MIB, snapshots=1, budget_bytes=9 * MIB).wait(30)
        assert client.held_nbytes(url) == 8 * MIB
    check_step(url, 1)


def test_a_save_takes_what_is_being_warmed(folder: Path, url: str, held: Path):
    """Warming that waits for an arena gives up the one it has, and the save that comes has it at once."""
    with KeeperClient.connect(0) as client:
        staged = stage(client, url, 1, 1, nbytes=MIB)
        client.warm(2 * MIB, url)
        wait_for(lambda: statuses()[0].arenas[-1].state == "granted", "the second arena is lent, the first is busy")
        arena = client.arena(MIB, url, 30)
        assert not client.is_warming
        assert arena.wait_s < 30
        held.touch()
        staged.wait(30)
        client.release(arena)
    check_step(url, 1)


def test_a_restart_with_other_ranks(trainers: Callable[..., Trainer], url: str, monkeypatch: pytest.MonkeyPatch):
    """A keeper that lingers gives the memory of ranks that died to the ranks that came instead."""
    monkeypatch.setenv("CKPT_LINGER_S", "3600")
    seven = trainers(7)
    seven.do("borrow", run=url, nbytes=3 * MIB)
    with KeeperClient.connect(0) as client:
        with pytest.raises(KeeperError, match="budget_bytes allows"):
            client.arena(MIB, url, budget_bytes=5_000_000)
        seven.kill()
        wait_for(lambda: [c.rank for c in statuses()[0].clients] == [0], "rank 7 is gone")
        assert [(a.rank, a.state) for a in statuses()[0].arenas] == [(7, "free")]
        client.release(client.arena(MIB, url, budget_bytes=5_000_000))
        assert [a.rank for a in statuses()[0].arenas] == [0]


def test_the_newest_whole_snapshot_stays(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    """A save that fails leaves no snapshot: its arena is filled next, and not that of the last good save."""
    spec = {"wrap": "faulty", "program": "keeper", "match": "*/part-*", "operation": "create", "on_nth": 2}
    for name, value in store_env(spec).items():
        monkeypatch.setenv(name, value)
    with KeeperClient.connect(0) as client:
        stage(client, url, 1, 1).wait(30)
        with pytest.raises(StoreError):
            stage(client, url, 2, 2).wait(30)
        arena = client.arena(10_000, url)
        assert bytes(arena.view[-10:]) == payload(2, 0, 10)
        client.release(arena)
        stage(client, url, 3, 3).wait(30)
        assert bytes(client.arena(10_000, url).view[-10:]) == payload(1, 0, 10), "now it is the older one"


# -- a real cgroup ---------------------------------------------------------------------------

IN_A_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from ckpt.errors import KeeperError
from ckpt.keeper.client import KeeperClient
with KeeperClient.connect(0) as client:
    try:
        client.arena(1 << 30, sys.argv[2])
        print("granted")
    except KeeperError as error:
        print(error)
    arena = client.arena(8 << 20, sys.argv[2])
    arena.view[:4] = b"kept"
    print(bytes(arena.view[:4]).decode())
    client.release(arena)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A group below this process's own that may have 256 MiB."""
    above = next((Path(at) for version, at in memory._groups("/proc") if Path(at, "memory.stat").exists()), None)
    if above is None:
        pytest.skip("no memory cgroup is mounted")
    made = above / f"ckpt-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made in {above}: {error.strerror}")
    try:
        limit = next((made / name for name in ("memory.max", "memory.limit_in_bytes") if (made / name).exists()), None)
        if limit is None:
            pytest.skip(f"groups in {above} have no memory controller")
        limit.write_text(str(256 * MIB))
        yield made
        wait_for(lambda: not (made / "cgroup.procs").read_text(), "its processes are gone")
    finally:
        made.rmdir()


def test_a_real_group(folder: Path, url: str, group: Path):
    """In a group of 256 MiB a keeper refuses 1 GiB, naming the group's file, before the kernel kills; 8 MiB it has."""
    words = [sys.executable, "-c", IN_A_GROUP, str(group), url]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    refused, kept = done.stdout.splitlines()
    assert refused.startswith("no memory for the snapshot of rank 0: it needs 1,073,741,824 bytes more, ")
    assert f"({group}/memory." in refused
    assert kept == "kept"
