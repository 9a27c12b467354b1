from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.testing.power_cut import Disk, Tree, write_tree
from ckpt.testing.system_calls import Half, Proceed, StorageCall, interposed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A disk with one file that is safe."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "old").write_bytes(b"old")
    return tmp_path / "disk"


@pytest.fixture
def disk(root: Path) -> Iterator[Disk]:
    """Follows all that the test does below the root."""
    followed = Disk(root)

    def around(call: StorageCall, proceed: Proceed, half: Half) -> object:
        result = proceed()
        followed.apply(call)
        return result

    with interposed(around, lambda path: f"{path}/".startswith(f"{root}/")):
        yield followed


def images(disk: Disk) -> set[frozenset[tuple[str, bytes | None]]]:
    """All different trees."""
    return {frozenset(tree.items()) for _, tree in disk.images()}


def trees(*expected: Tree) -> set[frozenset[tuple[str, bytes | None]]]:
    return {frozenset({"old": b"old", **tree}.items()) for tree in expected}


def write(path: Path, content: bytes, *, sync: bool = True) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(file, content)
    if sync:
        os.fsync(file)
    os.close(file)


def sync(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def test_what_is_synced_is_sure(root: Path, disk: Disk) -> None:
    """File and folder: one image."""
    write(root / "a", b"1234")
    sync(root)
    assert images(disk) == trees({"a": b"1234"})


def test_bytes_that_were_not_synced_are_lost_kept_or_torn(root: Path, disk: Disk) -> None:
    """In a file whose name is sure."""
    write(root / "a", b"1234", sync=False)
    sync(root)
    assert images(disk) == trees(*({"a": content} for content in (b"", b"12", b"1234", bytes(4))))


def test_a_name_that_was_not_synced_may_be_missing(root: Path, disk: Disk) -> None:
    """Though the bytes are sure."""
    write(root / "a", b"1234")
    assert images(disk) == trees({}, {"a": b"1234"})


def test_names_are_lost_independently_of_their_order(root: Path, disk: Disk) -> None:
    """The second of two may be there without the first."""
    write(root / "a", b"1")
    write(root / "b", b"2")
    assert images(disk) == trees({}, {"a": b"1"}, {"b": b"2"}, {"a": b"1", "b": b"2"})


def test_a_removal_that_was_not_synced_may_be_undone(root: Path, disk: Disk) -> None:
    """And a name that was made again may be what it was before, or nothing."""
    os.unlink(root / "old")
    assert images(disk) == {frozenset({("old", b"old")}), frozenset()}
    write(root / "old", b"new")
    assert images(disk) == {frozenset({("old", b"old")}), frozenset(), frozenset({("old", b"new")})}
    sync(root)
    assert images(disk) == {frozenset({("old", b"new")})}


def test_a_folder_goes_with_all_that_is_in_it(root: Path, disk: Disk) -> None:
    """Until its name is synced into the folder above, what is synced inside of it is not sure."""
    os.mkdir(root / "d")
    write(root / "d" / "a", b"1")
    sync(root / "d")
    assert images(disk) == trees({}, {"d": None, "d/a": b"1"})
    sync(root)
    assert images(disk) == trees({"d": None, "d/a": b"1"})


def test_a_removed_folder_may_come_back_with_any_of_its_files(root: Path, disk: Disk) -> None:
    """Why COMMIT is removed first, and that synced."""
    os.mkdir(root / "d")
    write(root / "d" / "a", b"1")
    write(root / "d" / "COMMIT", b"2")
    sync(root / "d")
    sync(root)
    os.unlink(root / "d" / "COMMIT")
    os.unlink(root / "d" / "a")
    os.rmdir(root / "d")
    found = images(disk)
    assert frozenset({("old", b"old"), ("d", None), ("d/COMMIT", b"2")}) in found
    assert len(found) == 5


def test_a_file_without_a_name_is_there_once_it_is_linked(root: Path, disk: Disk) -> None:
    """Whole, if it was synced before; or not at all."""
    folder = os.open(root, os.O_RDONLY)
    file = os.open(".", os.O_TMPFILE | os.O_WRONLY, dir_fd=folder)
    os.write(file, b"1234")
    assert images(disk) == trees({})
    os.fsync(file)
    os.link(f"/proc/self/fd/{file}", "a", src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    assert images(disk) == trees({}, {"a": b"1234"})
    for opened in (file, folder):
        os.close(opened)


def naive(root: Path) -> None:
    """The data, then the mark that says that it is there; both synced only in the end."""
    write(root / "data", b"1234", sync=False)
    write(root / "mark", b"")


def careful(root: Path) -> None:
    write(root / "data", b"1234")
    sync(root)
    write(root / "mark", b"")


@pytest.mark.parametrize(("way", "holds"), [(naive, False), (careful, True)])
def test_it_tells_a_careful_writer_from_a_naive_one(
    way: Callable[[Path], None], holds: bool, root: Path, disk: Disk
) -> None:
    """Wherever the mark is, the data must be."""
    way(root)
    assert all(tree.get("data") == b"1234" for _, tree in disk.images() if "mark" in tree) == holds


@pytest.mark.parametrize("seed", range(8))
def test_the_model_is_the_disk(seed: int, root: Path, disk: Disk, tmp_path: Path) -> None:
    """After any calls, what processes see is what lies there; and a crash that loses nothing is among the images."""
    chance = random.Random(seed)
    for number in range(40):
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        files = [path for path in root.rglob("*") if path.is_file()]
        match chance.choice(["write", "write", "mkdir", "unlink", "rmdir", "sync", "append", "link"]):
            case "write":
                write(chance.choice(folders) / f"f{number}", chance.randbytes(9), sync=chance.random() < 0.5)
            case "mkdir":
                os.mkdir(chance.choice(folders) / f"d{number}")
            case "unlink" if files:
                os.unlink(chance.choice(files))
            case "rmdir":
                empty = [folder for folder in folders[1:] if not any(folder.iterdir())]
                if empty:
                    os.rmdir(chance.choice(empty))
            case "sync":
                sync(chance.choice(folders))
            case "append" if files:
                with open(chance.choice(files), "ab") as file:
                    file.write(b"more")
            case "link" if files:
                os.link(chance.choice(files), chance.choice(folders) / f"l{number}")
    there = {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in root.rglob("*")}
    assert disk.now() == there
    assert frozenset(there.items()) in images(disk)
    write_tree(disk.now(), tmp_path / "image")
    image = tmp_path / "image"
    assert {str(p.relative_to(image)): None if p.is_dir() else p.read_bytes() for p in image.rglob("*")} == there
