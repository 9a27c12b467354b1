r"""What a trainer and its keeper say to each other over their unix socket.

A line with the protocol's version goes first, both ways; then come frames: a big-endian
32-bit length and a tagged msgpack struct. The handshake proves, both ways, that the other
side can read the secret file beside the socket::

    client                                      keeper
    "ckpt-keeper/3\n", Hello(nonce)         ->
                                            <-  "ckpt-keeper/3\n", Challenge(nonce, proof)
    Answer(proof, rank)                     ->
                                            <-  Welcome(pid, job)  or  Failed
    ArenaRequest                            ->
                                            <-  ArenaGrant, with the arena's memfd beside it
    Begin(task)                             ->      the snapshot is about to be copied into the arena
    Ready(nbytes), again and again          ->      so much of the arena is final: the keeper writes it meanwhile
    Ready(the end)                          ->
                                            <-  Staged             from now on the keeper finishes the save alone
                                            <-  Saved  or  Failed
    Bye                                     ->
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any, TypeAlias, TypeVar

import msgspec

from ckpt.errors import KeeperError, RankError
from ckpt.format.alarms import Alarm
from ckpt.format.part import RankTensor
from ckpt.plan.retention import KeepPolicy

VERSION = 3
PREAMBLE = b"ckpt-keeper/%d\n" % VERSION
PREAMBLE_LIMIT_NBYTES = 64
NONCE_NBYTES = 16
HELLO_LIMIT_NBYTES = 4096  # until the other side has proved itself
FRAME_LIMIT_NBYTES = 256 << 20  # a task carries whole layouts and values

_LENGTH = struct.Struct(">I")


class FileTask(msgspec.Struct, frozen=True):
    """One data file of a rank, laid out in the arena as it shall be stored (see ``DataFile``)."""

    group: str
    name: str
    arena_offset: int
    nbytes: int  # header and payload
    header_nbytes: int
    shards: tuple[int, ...]  # bytes of each shard, in file order


class LayoutTask(msgspec.Struct, frozen=True):
    """A layout to store before COMMIT, and the ranks that have it as inclusive ranges."""

    digest: str
    raw: bytes  # on its way b"" when the task before on the same connection had it
    ranks: tuple[tuple[int, int], ...]


class WatchTask(msgspec.Struct, frozen=True):
    """What to look for in each shard of a task's files; ``ckpt.keeper.alarms`` makes and reads ``raw``."""

    digest: str  # of ``raw``
    raw: bytes  # on its way b"" when the task before on the same connection had it


class SaveTask(msgspec.Struct, frozen=True):
    """All that a keeper needs to persist one rank's snapshot and, for rank 0, to commit the step.

    ``values_digests``: top-level key -> digest of its value. A key that starts with ``group:`` must
    agree between the ranks of one layout, any other between all ranks.
    """

    run: str  # the store's URL
    step: int
    writer: int
    save: int
    rank: int
    world: int
    arena: int
    encode: str  # "raw" or "zstd"
    files: tuple[FileTask, ...]
    layout: str  # digest
    rank_tensors: tuple[RankTensor, ...]
    values: dict[str, Any] | None
    values_digests: dict[str, str]
    rank_values: dict[str, Any]
    layouts: tuple[LayoutTask, ...] = ()  # on rank 0 only
    hf_index: bytes | None = None  # on rank 0 only
    metrics: bytes | None = None  # on rank 0 only: the record, as it shall be stored
    keep: KeepPolicy | None = None
    progress_timeout_s: float = 600.0
    max_write_mbps: float | None = None  # 10^6 bytes a second, of all ranks of the run on this node together
    parity_ranks: tuple[int, ...] = ()  # whose data files, this rank's among them, share a parity file; (): none
    parity_groups: tuple[int, ...] = ()  # on rank 0 only: the lowest rank of every such set
    watch: WatchTask | None = None  # None: nothing is looked for
    found: tuple[Alarm, ...] = ()  # on rank 0 only: what the trainers found
    alarms_fail: bool = False  # on rank 0 only: whether a step with an alarm must not come to be


def brief(task: SaveTask, before: frozenset[str]) -> tuple[SaveTask, frozenset[str]]:
    """(``task`` without layouts and watch that the task before had, the digests of its own): the largest there is."""
    large: tuple[LayoutTask | WatchTask, ...] = (*task.layouts, *(() if task.watch is None else (task.watch,)))
    digests = frozenset(one.digest for one in large)
    if not digests:
        return task, before
    layouts = tuple(
        msgspec.structs.replace(layout, raw=b"") if layout.digest in before else layout for layout in task.layouts
    )
    watch = task.watch
    if watch is not None and watch.digest in before:
        watch = msgspec.structs.replace(watch, raw=b"")
    return msgspec.structs.replace(task, layouts=layouts, watch=watch), digests


def whole(task: SaveTask, before: dict[str, bytes]) -> tuple[SaveTask, dict[str, bytes]]:
    """The other side of ``brief``: (the whole task, all that can be left out). KeeperError for what was never sent."""
    large: tuple[LayoutTask | WatchTask, ...] = (*task.layouts, *(() if task.watch is None else (task.watch,)))
    if not large:
        return task, before
    raws = {one.digest: one.raw or before.get(one.digest, b"") for one in large}
    if not all(raws.values()):
        raise KeeperError("a task without its layouts or watch, which no task before it on this connection had")
    layouts = tuple(msgspec.structs.replace(layout, raw=raws[layout.digest]) for layout in task.layouts)
    watch = task.watch
    if watch is not None:
        watch = msgspec.structs.replace(watch, raw=raws[watch.digest])
    return msgspec.structs.replace(task, layouts=layouts, watch=watch), raws


def arena_end(task: SaveTask) -> int:
    """Where a task's last file ends in its arena: the watermark at which its snapshot is whole."""
    return max((file.arena_offset + file.nbytes for file in task.files), default=0)


class SaveResult(msgspec.Struct, frozen=True):
    """What became of one rank's task: its bytes, and what it took in seconds."""

    step: int
    attempt: str  # "w7.3"
    nbytes_written: int
    write_s: float  # from the begin of the copy until all of it was durable
    commit_s: float  # from staged to COMMIT
    warnings: tuple[str, ...] = ()  # what went wrong without harming the step, such as retention
    alarms: tuple[Alarm, ...] = ()  # of the step, over all ranks


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The client's first frame."""

    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The keeper's proof, and what the client has to prove."""

    nonce: bytes
    proof: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The client's proof. ``rank`` None: it only asks for the status and is no part of the job."""

    proof: bytes
    rank: int | None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The handshake is over."""

    pid: int
    job: str


class ArenaRequest(msgspec.Struct, frozen=True, tag="arena"):
    """Asks for one of this rank's arenas of a run; answered as soon as one is free.

    The newest request says how many the rank may have, and what all arenas of the run on this node may take together.
    """

    request: int
    run: str
    nbytes: int
    snapshots: int = 2  # 1: the next snapshot waits until the one before is durable
    budget_bytes: int | None = None


class ArenaGrant(msgspec.Struct, frozen=True, tag="grant"):
    """An arena of at least the asked bytes; its memfd comes with this frame."""

    request: int
    arena: int
    nbytes: int
    arenas: tuple[int, ...]  # all that the rank has of the run now: what is mapped of others is let go


class ArenaRelease(msgspec.Struct, frozen=True, tag="release"):
    """The snapshot was given up before it was staged."""

    arena: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A snapshot is about to be copied into the arena: write it as it comes, which ``Ready`` tells.

    A client that leaves, dies, releases the arena or abandons the attempt before the end has failed the save.
    """

    request: int
    task: SaveTask


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The arena's first ``nbytes`` are final. Never less than before; ``arena_end(task)`` at last.

    That last one is sent whatever has become of the save: it says that the trainer is done with the arena.
    """

    request: int  # of the Begin
    nbytes: int


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """This rank's part of the attempt will never come; the other ranks must not wait for it."""

    run: str
    step: int
    writer: int
    save: int
    rank: int
    world: int
    message: str
    exit_code: int = RankError.exit_code  # of the cause


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """The keeper has the task and finishes it even if the trainer dies now."""

    request: int


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """The step is committed."""

    request: int
    result: SaveResult


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request failed; ``kind`` is the name of the CkptError. Request 0: the connection itself."""

    request: int
    kind: str
    message: str
    exit_code: int = 0  # of the cause; 0: that of the kind
    at_fault: bool = False  # whether it was this rank's part that failed


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The client leaves. Not ``done``: its rank may come back, so the keeper lingers."""

    done: bool


class StatusRequest(msgspec.Struct, frozen=True, tag="status?"):
    """Asks what the keeper is doing."""

    request: int


class RankStatus(msgspec.Struct, frozen=True):
    """One rank's work on a save."""

    rank: int
    state: str  # "queued" "writing" "durable" "failed"
    nbytes_written: int
    nbytes: int


class SaveStatus(msgspec.Struct, frozen=True):
    """A save that is neither committed nor failed yet."""

    run: str
    step: int
    attempt: str
    world: int
    ranks: tuple[RankStatus, ...]
    missing: tuple[int, ...]  # ranks without a durable part, as far as this keeper knows
    failure: str  # why it will not become a step, while what it has written is removed; else ""


class ClientStatus(msgspec.Struct, frozen=True):
    """A connected trainer process."""

    rank: int
    pid: int


class ArenaStatus(msgspec.Struct, frozen=True):
    """One arena: "free", "granted", "filling" (copied into and written), "staged", "stuck" (a failed save reads it)."""

    arena: int
    run: str
    rank: int
    nbytes: int
    state: str


class RunStatus(msgspec.Struct, frozen=True):
    """The memory of one run on this node: the sum of its arenas, and what was agreed about them."""

    run: str
    nbytes: int
    snapshots: int  # arenas that each rank may have
    budget_bytes: int | None  # what all of them may take together


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What the keeper is doing."""

    request: int
    pid: int
    job: str
    uptime_s: float
    ends_in_s: float | None  # None: not before its trainers have left and its work is done
    clients: tuple[ClientStatus, ...]
    saves: tuple[SaveStatus, ...]
    arenas: tuple[ArenaStatus, ...]
    runs: tuple[RunStatus, ...]
    available_nbytes: int  # for more arenas, and what limits that
    available_by: str
    log: str


FromClient: TypeAlias = Hello | Answer | ArenaRequest | ArenaRelease | Begin | Ready | Abandon | Bye | StatusRequest
FromKeeper: TypeAlias = Challenge | Welcome | ArenaGrant | Staged | Saved | Failed | Status

from_client = msgspec.msgpack.Decoder(FromClient)
from_keeper = msgspec.msgpack.Decoder(FromKeeper)
_encoder = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


def message_of(body: bytes, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    """The message in a frame's body, by ``from_client`` or ``from_keeper``. KeeperError for anything else."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise KeeperError(f"a frame of {len(body)} bytes that is no message: {error}") from None


def pack(message: msgspec.Struct) -> bytes:
    """One frame. KeeperError when it is larger than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT_NBYTES:
        raise KeeperError(
            f"a message of {len(body)} bytes to the keeper, at most {FRAME_LIMIT_NBYTES} are allowed: "
            "keep large values in tensors instead of plain lists and dicts"
        )
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes from a socket in, whole frames out."""

    def __init__(self, limit_nbytes: int = HELLO_LIMIT_NBYTES) -> None:
        self.limit_nbytes = limit_nbytes
        self._bytes = bytearray()

    def feed(self, received: bytes) -> None:
        """Add what a ``recv`` returned."""
        self._bytes += received

    def line(self) -> bytes | None:
        """The version line, once it is whole. KeeperError when there is none in the first bytes."""
        end = self._bytes.find(b"\n", 0, PREAMBLE_LIMIT_NBYTES)
        if end < 0:
            if len(self._bytes) >= PREAMBLE_LIMIT_NBYTES:
                raise KeeperError(f"the other side speaks another protocol: it began with {bytes(self._bytes[:16])!r}")
            return None
        line = bytes(self._bytes[: end + 1])
        del self._bytes[: end + 1]
        return line

    def frame(self) -> bytes | None:
        """The next whole frame's body, or None. KeeperError as soon as a frame says it is too large."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._bytes)
        if nbytes > self.limit_nbytes:
            raise KeeperError(f"a frame of {nbytes} bytes, at most {self.limit_nbytes} are allowed here")
        if len(self._bytes) < _LENGTH.size + nbytes:
            return None
        body = bytes(memoryview(self._bytes)[_LENGTH.size : _LENGTH.size + nbytes])
        del self._bytes[: _LENGTH.size + nbytes]
        return body


def prove(secret: bytes, role: str, client_nonce: bytes, keeper_nonce: bytes) -> bytes:
    """What only a process that can read the secret can say; ``role`` is ``client`` or ``keeper``."""
    return hashlib.blake2b(role.encode() + b"\0" + client_nonce + b"\0" + keeper_nonce, key=secret).digest()


def same(proof: bytes, expected: bytes) -> bool:
    """Whether two proofs are equal, in constant time."""
    return hmac.compare_digest(proof, expected)
