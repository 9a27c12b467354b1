"""COMMIT: the one small object whose presence makes a step exist; it pins layouts and parts by digest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ckpt.errors import DamagedError, UnsupportedFormatError
from ckpt.format import alarms, records
from ckpt.format.layout import Layout, Mesh, Tensor
from ckpt.format.nodes import text_of
from ckpt.format.part import part_name

COMMIT = "COMMIT"
HF_INDEX = "model.safetensors.index.json"
KNOWN_FEATURES = frozenset({"zstd", alarms.FEATURE})

RECORD_LIMIT_NBYTES = 1 << 30  # of a layout or a part

_FOLDER = re.compile(r"step-([0-9]{8,19})-(w[0-9]{1,18}\.[0-9]{1,18})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class LayoutRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout and the ranks that have it, as inclusive ranges ``[first, last]``."""

    digest: str
    nbytes: int
    ranks: tuple[tuple[int, int], ...]


class FileRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A pinned file of the attempt's folder."""

    name: str
    nbytes: int
    digest: str


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step is. ``parts[r]`` is rank r's; ``files`` pins what else readers use (the HF index)."""

    format: str
    step: int
    attempt: str  # "w7.3"
    world: int
    features: tuple[str, ...]
    written_by: str  # "ckpt 0.1.0"
    created_unix_s: float
    layouts: tuple[LayoutRef, ...]
    parts: tuple[FileRef, ...]
    files: tuple[FileRef, ...] = ()


class Attempt(msgspec.Struct, frozen=True, order=True):
    """One try at writing a step: the writer's save number ``save`` of writer ``writer``."""

    step: int
    writer: int
    save: int

    @property
    def label(self) -> str:
        """``w7.3``."""
        return f"w{self.writer}.{self.save}"

    @property
    def folder(self) -> str:
        """``step-00000300-w7.3``."""
        return f"step-{self.step:08d}-{self.label}"


def parse_folder(name: str) -> Attempt | None:
    """The attempt whose folder is ``name``, or None for any other name."""
    match = _FOLDER.fullmatch(name)
    label = records.parse_label(match[2]) if match else None
    if match is None or label is None:
        return None
    attempt = Attempt(int(match[1]), *label)
    return attempt if attempt.folder == name else None


def encode_commit(commit: Commit) -> bytes:
    """COMMIT's bytes: one line of JSON, then one line with that line's digest.

    BadInputError for one that no reader would take.
    """
    line = records.encode_checked(commit, check_commit)
    return line + b"\n" + records.digest(line).encode() + b"\n"


def decode_commit(raw: bytes, where: str) -> Commit:
    """The COMMIT in ``raw``; torn or altered bytes raise DamagedError, unknown features UnsupportedFormatError."""
    line, newline, tail = raw.partition(b"\n")
    found = records.digest(line)
    if not newline or tail != found.encode() + b"\n":
        raise DamagedError(
            f"{where}: torn or altered ({len(raw)} bytes; its last line should be the digest {found} of the first)"
        )
    _refuse_unknown_features(line, where)
    commit = records.decode(line, Commit, where)
    check_commit(commit, where)
    return commit


def check_commit(commit: Commit, where: str) -> None:
    """DamagedError for a COMMIT that no ckpt wrote, although it can be read.

    After it every name is a plain file name by the naming rule, every digest a digest, and the
    layouts' ranges cover each rank exactly once.
    """
    records.check_attempt(commit.step, commit.attempt, commit.world, where)
    records.check_text(commit.written_by, where, "written_by")
    records.check_time(commit.created_unix_s, where)
    if len(set(commit.features)) != len(commit.features):
        raise records.damaged(where, "a feature twice", "each feature once")
    _check_layouts(commit, where)
    if len(commit.parts) != commit.world:
        raise records.damaged(where, f"{len(commit.parts)} parts for a world of {commit.world}", "one per rank")
    names = [part_name(rank, commit.world) for rank in range(commit.world)]
    for rank, (part, expected) in enumerate(zip(commit.parts, names, strict=True)):
        if part.name != expected:
            raise records.damaged(where, f"rank {rank}'s part {part.name[:64]!r}", repr(expected))
        if not 1 <= part.nbytes <= RECORD_LIMIT_NBYTES:  # said first: there can be very many parts
            records.check_count(part.nbytes, where, f"bytes of {expected}", least=1, most=RECORD_LIMIT_NBYTES)
    records.check_digests([part.digest for part in commit.parts], where, names)
    _check_files(commit, where)


def _check_layouts(commit: Commit, where: str) -> None:
    digests = [layout.digest for layout in commit.layouts]
    if len(set(digests)) != len(digests):
        raise records.damaged(where, "a layout twice", "each layout once")
    covered = 0
    for layout in commit.layouts:
        records.check_digest(layout.digest, where, "a layout")
        records.check_count(layout.nbytes, where, "bytes of a layout", least=1, most=RECORD_LIMIT_NBYTES)
        if not layout.ranks:
            raise records.damaged(where, f"the layout {layout.digest} for no rank", "at least one range")
    for first, last in sorted(ranks for layout in commit.layouts for ranks in layout.ranks):
        if first != covered or last < first or last >= commit.world:
            found = f"a layout for the ranks {_short(first)} to {_short(last)}"
            raise records.damaged(where, found, f"each of the {commit.world} ranks in one range, next {covered}")
        covered = last + 1
    if covered != commit.world:
        raise records.damaged(where, f"layouts for {covered} ranks", f"for {commit.world}")


def _check_files(commit: Commit, where: str) -> None:
    taken = {COMMIT, *(part.name for part in commit.parts)}
    for file in commit.files:
        if _FILE_NAME.fullmatch(file.name) is None or file.name in taken:
            raise records.damaged(where, f"the file {file.name[:64]!r}", "a plain file name of its own")
        taken.add(file.name)
        records.check_count(file.nbytes, where, f"bytes of {file.name}", most=RECORD_LIMIT_NBYTES)
        records.check_digest(file.digest, where, file.name)


_Listed = tuple[str, int, Tensor]  # digest of a layout, number of the mesh, and the tensor as that layout has it


def check_step(refs: Sequence[LayoutRef], world: int, layouts: Mapping[str, Layout], where: str) -> None:
    """DamagedError unless ``layouts`` (by digest, all of COMMIT's) together say where every tensor's bytes are.

    Each name has one shape and dtype and is owned; and every rank of an owner's mesh is in a layout
    that lists the tensor with that mesh and those owners, so that every shard was written.
    """
    ranks = {ref.digest: {r for first, last in ref.ranks for r in range(first, last + 1)} for ref in refs}
    numbers: dict[Mesh, int] = {}  # a mesh can be long: hashed once, then it is its number
    meshes: list[frozenset[int]] = []
    lists: dict[str, list[_Listed]] = {}
    for digest, layout in layouts.items():
        for index, mesh in enumerate(layout.meshes):
            if max(mesh.ranks) >= world:
                found = f"mesh {index} of the layout {digest} with rank {max(mesh.ranks)}"
                raise records.damaged(where, found, f"ranks below {world}")
            if numbers.setdefault(mesh, len(meshes)) == len(meshes):
                meshes.append(frozenset(mesh.ranks))
        own = [numbers[mesh] for mesh in layout.meshes]
        for tensor in layout.tensors:
            lists.setdefault(tensor.name, []).append((digest, own[tensor.mesh], tensor))
    covered: set[tuple[int, tuple[str, ...]]] = set()
    for name, listed in lists.items():
        mesh_number, writers = _writers(name, listed, where)
        if (mesh_number, writers) in covered:
            continue
        missing = sorted(meshes[mesh_number].difference(*(ranks.get(digest, ()) for digest in writers)))
        if missing:
            found = f"rank {missing[0]} in its mesh, but in none of the layouts that own it"
            raise records.damaged(_at(where, name), found, "every rank of the mesh to write its shard")
        covered.add((mesh_number, writers))


def _writers(name: str, listed: Sequence[_Listed], where: str) -> tuple[int, tuple[str, ...]]:
    """(number of the mesh, layouts) of those who own a tensor."""
    digest, number, tensor = listed[0]
    if len(listed) == 1 and tensor.owners:  # most are: nothing to compare
        return number, (digest,)
    if len({(t.group, t.dtype, t.shape, t.kind) for _, _, t in listed}) > 1:
        found = "another group, dtype, shape or kind in another layout"
        raise records.damaged(_at(where, name), found, "the same in all")
    owned = {(mesh_number, t.placements, t.owners) for _, mesh_number, t in listed if t.owners}
    if len(owned) != 1:
        found = f"{len(owned)} ways in which its bytes are owned"
        expected = "the same mesh, placements and owners in all layouts that own it"
        raise records.damaged(_at(where, name), found, expected)
    return next(iter(owned))[0], tuple(digest for digest, _, t in listed if t.owners)


def _at(where: str, name: str) -> str:
    return f"{where}: tensor {name[:200]!r}"


def _short(value: int) -> str:
    return str(value) if value.bit_length() < 64 else f"(an int of {value.bit_length()} bits)"


class _Head(msgspec.Struct):
    format: Any = None
    features: Any = ()
    written_by: Any = None


def _refuse_unknown_features(line: bytes, where: str) -> None:
    """Before anything else is asked of the record, since a feature may change what fields it has."""
    try:
        head = msgspec.json.decode(line, type=_Head)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DamagedError(f"{where}: not a readable COMMIT ({error})") from None
    if head.format != records.FORMAT or not isinstance(head.features, list):
        return  # records.decode says what is wrong with it
    unknown = sorted({text_of(feature) for feature in head.features} - KNOWN_FEATURES)
    if unknown:
        version = text_of(head.written_by) if head.written_by else "an unnamed version"
        raise UnsupportedFormatError(
            f"{where}: needs the unknown feature{'s' if len(unknown) > 1 else ''} {', '.join(unknown[:8])}; "
            f"it was written by {version}, read it with that version or a newer one"
        )
