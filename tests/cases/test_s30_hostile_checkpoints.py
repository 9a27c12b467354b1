"""S30: a checkpoint from someone with bad intent runs no code, stays inside its run, and takes bounded memory.

Each attack is carried out on a run whose digests are made to fit; then every verb that reads a run is tried on it.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.format import records
from ckpt.format.commit import COMMIT, HF_INDEX
from tests.security.hostile import Attack, Hostile, Outcome, Pickled, carried_out, check, compact

EVIL = pickle.dumps(Pickled())
DIGEST = "0" * 32


# -- pickles -----------------------------------------------------------------------------------------


def extra_files(run: Hostile) -> None:
    """Names that some loader or interpreter would pick up."""
    for name in (
        "data.pkl",
        "evil.pkl",
        ".metadata",
        "model.pt",
        "optimizer.bin",
        "sitecustomize.py",
        "__init__.py",
        "state.pkl",
    ):
        for folder in (run.folder, run.path, run.path / "layouts", run.path / "writers"):
            (folder / name).write_bytes(EVIL)


def pinned_extra_file(run: Hostile) -> None:
    """Even COMMIT names it."""
    (run.folder / "data.pkl").write_bytes(EVIL)
    pinned = {"name": "data.pkl", "nbytes": len(EVIL), "digest": records.digest(EVIL)}
    commit = run.commit()
    run.put_commit(commit | {"files": [*commit["files"], pinned]})


def pickle_as_commit(run: Hostile) -> None:
    (run.folder / COMMIT).write_bytes(EVIL)


def pickle_as_sealed_commit(run: Hostile) -> None:
    run.put_commit(EVIL.replace(b"\n", b" "))


def pickle_as_data(run: Hostile) -> None:
    file = run.part()["files"][0]
    run.put_file(
        0, EVIL, nbytes=len(EVIL), header_nbytes=8, header_digest=records.digest(EVIL[:8]), chunks=file["chunks"]
    )


def pickle_as_whole_data(run: Hostile) -> None:
    """Of the right size, its digests made to fit: tensors may hold any bytes, also these."""
    old = run.data_path.read_bytes()
    header = old[: run.part()["files"][0]["header_nbytes"]]
    payload = EVIL.ljust(len(old) - len(header), b"\0")
    run.put_file(0, header + payload, chunks=[records.digest(payload)])


def value_of(node: Any) -> Callable[[Hostile], None]:
    """A value in the part that is no typed JSON, or one that stands for code."""

    def act(run: Hostile) -> None:
        part = run.part()
        part["values"]["epoch"] = node
        part["values_digests"]["epoch"] = records.digest(compact(node))
        run.put_part(part)

    return act


# -- paths ---------------------------------------------------------------------------------------------


def data_called(name: str) -> Callable[[Hostile], None]:
    """The part names its data file so; a file with the right bytes is there."""

    def act(run: Hostile) -> None:
        target = Path(os.path.normpath(run.folder / name.split("\0", maxsplit=1)[0]))
        if target.parent.is_dir() and not target.exists() and str(target).startswith(str(run.path.parent)):
            shutil.copy(run.data_path, target)
        run.put_file(0, name=name)

    return act


def part_called(name: str) -> Callable[[Hostile], None]:
    def act(run: Hostile) -> None:
        commit = run.commit()
        commit["parts"][0]["name"] = name
        run.put_commit(commit)

    return act


def grown(which: str) -> Callable[[Hostile], None]:
    """A file of 1 TiB, of which nothing is on the disk."""

    def act(run: Hostile) -> None:
        os.truncate(_place(run, which), 1 << 40)

    return act


def pinned_called(name: str) -> Callable[[Hostile], None]:
    def act(run: Hostile) -> None:
        commit = run.commit()
        run.put_commit(commit | {"files": [{"name": name, "nbytes": 1, "digest": DIGEST}]})

    return act


def layout_called(name: str) -> Callable[[Hostile], None]:
    def act(run: Hostile) -> None:
        commit = run.commit()
        commit["layouts"][0]["digest"] = name
        run.put_part(run.part() | {"layout": name}, layouts=commit["layouts"])

    return act


def tensor_called(name: str) -> Callable[[Hostile], None]:
    """A tensor's name is no path: restore makes its files from groups alone."""

    def act(run: Hostile) -> None:
        layout = run.layout()
        layout["tensors"][1]["name"] = name
        run.put_layout(layout)

    return act


def linked(which: str) -> Callable[[Hostile], None]:
    """A file or folder moved out of the run, and a link in its place: what it holds is right."""

    def act(run: Hostile) -> None:
        path = _place(run, which)
        target = run.outside / path.name
        shutil.move(path, target)
        path.symlink_to(target)

    return act


def _place(run: Hostile, which: str) -> Path:
    return {
        "data": run.data_path, "part": run.part_path, "COMMIT": run.folder / COMMIT, "index": run.folder / HF_INDEX,
        "layout": run.layout_path, "writer": run.path / "writers/000001.json", "attempt": run.folder,
        "layouts": run.path / "layouts", "writers": run.path / "writers",
    }[which]  # fmt: skip


# -- no files ------------------------------------------------------------------------------------------


def special(which: str, kind: str) -> Callable[[Hostile], None]:
    """A FIFO, a socket, a device that never ends, or a folder in the place of a file."""

    def act(run: Hostile) -> None:
        path = _place(run, which)
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                here = os.getcwd()
                os.chdir(path.parent)  # a socket's address is short
                sock.bind(path.name)
                os.chdir(here)
        elif kind == "device":
            os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 5))  # /dev/zero
        else:
            path.mkdir()

    return act


# -- sizes ---------------------------------------------------------------------------------------------


def frame_claims(nbytes: int) -> Callable[[Hostile], None]:
    """A zstd frame whose header states so many bytes, with one block of zeros repeated."""

    def act(run: Hostile) -> None:
        block = struct.pack("<I", (1 << 1 | 1) | (128 << 10) << 3)[:3] + b"\0"
        frame = b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", nbytes) + block
        part = run.part()
        packed = [[part["files"][0]["packed"][0][0], 0, len(frame), "zstd"]]
        run.put_file(0, frame, nbytes=len(frame), packed=packed)

    return act


def frame_with_a_window(run: Hostile) -> None:
    """The right content size, but a window of 3.75 TiB to decode it in."""
    frame = (
        b"\x28\xb5\x2f\xfd\x80\xff" + struct.pack("<I", 4096) + struct.pack("<I", (1 << 1 | 1) | 4096 << 3)[:3] + b"\0"
    )
    part = run.part()
    run.put_file(0, frame, nbytes=len(frame), packed=[[part["files"][0]["packed"][0][0], 0, len(frame), "zstd"]])


def frame_that_grows(run: Hostile) -> None:
    """The right content size, and blocks that make a thousand times as much."""
    block = struct.pack("<I", 1 << 1 | (128 << 10) << 3)[:3] + b"\0"
    frame = b"\x28\xb5\x2f\xfd" + b"\xa0" + struct.pack("<I", 4096) + block * 1000
    part = run.part()
    run.put_file(0, frame, nbytes=len(frame), packed=[[part["files"][0]["packed"][0][0], 0, len(frame), "zstd"]])


def header_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[Hostile], None]:
    """Another safetensors header over the same payload, of the same length, its digest pinned."""

    def act(run: Hostile) -> None:
        old = run.data_path.read_bytes()
        nbytes = run.part()["files"][0]["header_nbytes"]
        header = json.loads(old[8:nbytes])
        header = change(header) or header
        text = compact(header).ljust(nbytes - 8, b" ")
        raw = struct.pack("<Q", len(text)) + text
        run.put_file(
            0,
            raw + old[nbytes:],
            nbytes=len(raw) + len(old) - nbytes,
            header_nbytes=len(raw),
            header_digest=records.digest(raw),
        )

    return act


def header_length(length: int) -> Callable[[Hostile], None]:
    """Only the length field is another."""

    def act(run: Hostile) -> None:
        old = run.data_path.read_bytes()
        nbytes = run.part()["files"][0]["header_nbytes"]
        raw = struct.pack("<Q", length) + old[8:nbytes]
        run.put_file(0, raw + old[nbytes:], header_digest=records.digest(raw))

    return act


def _overlapping(header: dict[str, Any]) -> None:
    header["v"] = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}


def _out_of_range(header: dict[str, Any]) -> None:
    header["w"]["data_offsets"] = [8192, 8192 + 4096]


def _huge(header: dict[str, Any]) -> None:
    header["w"] |= {"shape": [2**40, 2**20], "data_offsets": [0, 2**62]}


def _beyond_64_bits(header: dict[str, Any]) -> None:
    header["w"]["data_offsets"] = [0, 2**64 + 4096]


def _negative(header: dict[str, Any]) -> None:
    header["w"]["data_offsets"] = [-4096, 0]


SEEN_BY_VERIFY = frozenset({"load"})  # readers go by part and layout; a header is for other programs

ATTACKS: dict[str, Attack] = {
    "extra files": Attack(extra_files, harmless=True),
    "pinned extra file": Attack(pinned_extra_file, harmless=True),
    "pickle as COMMIT": Attack(pickle_as_commit, says="torn or altered"),
    "pickle as a sealed COMMIT": Attack(pickle_as_sealed_commit, says="not a readable"),
    "pickle as part": Attack(lambda run: run.put_part(EVIL), says="not a readable ckpt record"),
    "pickle as layout": Attack(lambda run: run.put_layout(EVIL), says="not a readable ckpt record"),
    "pickle as data": Attack(pickle_as_data),
    "pickle as all data": Attack(pickle_as_whole_data, harmless=True),
    "pickle as writer": Attack(lambda run: _place(run, "writer").write_bytes(EVIL) and None, spread=True),
    "pickle as index": Attack(lambda run: (run.folder / HF_INDEX).write_bytes(EVIL) and None, unseen=SEEN_BY_VERIFY),
    "value is a pickle": Attack(
        value_of({"t": "pickle", "v": base64.b64encode(EVIL).decode()}), says="the tag 'pickle' is unknown"
    ),
    "value is a function": Attack(value_of({"t": "function", "v": "os.system"}), says="unknown"),
    "value is a class of torch": Attack(value_of({"t": "torch.dtype", "v": "load"}), unseen=frozenset({"verify"})),
    "value is a room of torch": Attack(value_of({"t": "torch.dtype", "v": "_inductor"}), unseen=frozenset({"verify"})),
    "value is a factory": Attack(
        value_of({"t": "defaultdict", "factory": "eval", "v": []}), says="not a readable defaultdict"
    ),
    "value is a numpy object": Attack(
        value_of({"t": "numpy", "dtype": "|O8", "v": "AAAAAAAAAAA="}), says="not a readable numpy"
    ),
    "data called ../../x": Attack(data_called("../../x"), says="the file '../../x'"),
    "data called ../x": Attack(data_called("../x"), says="the file '../x'"),
    "data called /etc/passwd": Attack(data_called("/etc/passwd"), says="the file '/etc/passwd'"),
    "data called with a zero": Attack(data_called("a\0b")),
    "data called like the other step's": Attack(data_called("../step-00000001-w1.1/model-00000-of-00001.safetensors")),
    "part called ../../x": Attack(part_called("../../x"), says="part '../../x'"),
    "pinned called ../../x": Attack(pinned_called("../../x"), says="the file '../../x'"),
    "pinned called /etc/passwd": Attack(pinned_called("/etc/passwd"), says="the file '/etc/passwd'"),
    "pinned called COMMIT": Attack(pinned_called(COMMIT)),
    "layout called ../../x": Attack(layout_called("../../x"), says="the digest '../../x'"),
    "tensor called ../../x": Attack(tensor_called("../../x")),
    "tensor called /tmp/x": Attack(tensor_called("/tmp/x")),
    **{f"link: {which}": Attack(linked(which)) for which in ("data", "part", "COMMIT", "attempt")},
    "link: index": Attack(linked("index"), unseen=SEEN_BY_VERIFY),
    **{f"link: {which}": Attack(linked(which), spread=True) for which in ("layout", "layouts", "writer", "writers")},
    **{
        f"{kind}: {which}": Attack(
            special(which, kind),
            spread=which in {"layout", "writer"},
            unseen=SEEN_BY_VERIFY if which == "index" else frozenset(),
        )
        for kind in ("fifo", "socket", "folder", *(["device"] if os.geteuid() == 0 else []))
        for which in ("data", "part", "COMMIT", "layout", "index", "writer")
    },
    **{
        f"grown: {which}": Attack(
            grown(which),
            spread=which in {"layout", "writer"},
            unseen=SEEN_BY_VERIFY if which == "index" else frozenset(),
        )
        for which in ("part", "COMMIT", "layout", "index", "writer")
    },
    "grown: data": Attack(grown("data"), unseen=SEEN_BY_VERIFY, says="1099511627776 bytes"),
    "zstd: a frame of 10 GiB": Attack(
        frame_claims(10 << 30), says="a zstd frame that states 10737418240 content size, expected 4096"
    ),
    "zstd: a frame of 2**63": Attack(frame_claims(2**63), says="content size, expected 4096"),
    "zstd: a frame with a large window": Attack(frame_with_a_window, says="zstd"),
    "zstd: a frame that grows": Attack(frame_that_grows, says="zstd"),
    "header: overlapping": Attack(header_of(_overlapping), unseen=SEEN_BY_VERIFY, says="overlaps"),
    "header: out of range": Attack(header_of(_out_of_range), unseen=SEEN_BY_VERIFY),
    "header: huge": Attack(header_of(_huge), unseen=SEEN_BY_VERIFY),
    "header: beyond 64 bits": Attack(header_of(_beyond_64_bits), unseen=SEEN_BY_VERIFY, says="two sizes"),
    "header: negative": Attack(header_of(_negative), unseen=SEEN_BY_VERIFY, says="two sizes"),
    "header: no object": Attack(header_of(lambda _: [1]), unseen=SEEN_BY_VERIFY, says="does not start with"),
    "header: 10 GiB long": Attack(header_length(10 << 30), unseen=SEEN_BY_VERIFY, says="a header of 10737418240 bytes"),
    "header: 2**64 - 1 long": Attack(
        header_length(2**64 - 1), unseen=SEEN_BY_VERIFY, says="a header of 18446744073709551615 bytes"
    ),
    "header: a byte longer than the file": Attack(header_length(1 << 20), unseen=SEEN_BY_VERIFY, says="in a file of"),
}

pytestmark = pytest.mark.timeout(420)  # the first test waits for all attacks, by one child


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return carried_out(__name__, tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", ATTACKS)
def test_s30_a_hostile_checkpoint_does_no_harm(outcomes: dict[str, Outcome], name: str):
    """No code, no path out of the step, a CkptError, less than 200 MiB, seconds; the step before is loaded."""
    check(ATTACKS[name], outcomes[name])
