"""Finding a job's keeper, or starting it: exactly one, however many ranks come at once.

Whoever wants in holds the lock file while it connects. If nobody listens, it binds the socket
itself, hands it to the new process, and connects to it at once: the kernel keeps the connection
until the keeper is up. A keeper takes the same lock to end, so nobody connects to one that goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator

import msgspec

from ckpt.errors import CkptError, KeeperError, error_from_kind
from ckpt.keeper import protocol
from ckpt.keeper.place import Place
from ckpt.processes import process_identity

START_TIMEOUT_S = 60.0  # Python on a cold network file system takes its time
ATTACH_TIMEOUT_S = 5.0
SECRET_NBYTES = 32
_LOOK_AGAIN_S = 0.2
_LOCK_TIMEOUT_S = 60.0
_TRIES = 3


class Link(msgspec.Struct, frozen=True):
    """A connection that has passed the handshake."""

    socket: socket.socket
    frames: protocol.FrameBuffer
    pid: int
    job: str


class _GoneError(Exception):
    """The keeper went before it answered."""


def join(place: Place, rank: int) -> Link:
    """Connect to the job's keeper as ``rank``, starting it when there is none. Raises KeeperError."""
    for _ in range(_TRIES):
        with locked(place):
            found = _connect_if_alive(place)
            if found is None:
                _spawn(place)
                found = _connect_if_alive(place)
            secret = _read_secret(place)
        if found is None or secret is None:
            continue
        sock, identity = found
        try:
            return _shake_hands(sock, secret, rank, identity, time.monotonic() + START_TIMEOUT_S)
        except _GoneError:
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise KeeperError(f"the keeper did not start ({_TRIES} tries); {place.path('log')} ends with: {_log_tail(place)}")


def attach(place: Place) -> Link | None:
    """Connect to a keeper only to ask it something; None when it is gone. Starts nothing."""
    with contextlib.suppress(OSError):
        found = _connect_if_alive(place)
        secret = _read_secret(place)
        if found is None or secret is None:
            return None
        sock, identity = found
        try:
            return _shake_hands(sock, secret, None, identity, time.monotonic() + ATTACH_TIMEOUT_S)
        except (CkptError, _GoneError):
            sock.close()
    return None


@contextlib.contextmanager
def locked(place: Place, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the place's lock file. KeeperError when someone else has it for longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    path = place.path("lock")
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, file):  # a keeper that ended removed the file it had locked
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise KeeperError(
                    f"{path}: locked by another process for {timeout_s:g} s; end it and try again"
                ) from None
        os.close(file)
        time.sleep(0.005)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # said aloud: a forked child may hold the same lock
        os.close(file)


def _is_still(path: str, file: int) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(file)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


@contextlib.contextmanager
def _reached(place: Place, suffix: str) -> Iterator[str]:
    """A short path to one of the place's files: a socket's address has room for 107 bytes only."""
    folder = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{place.key}.{suffix}"
    finally:
        os.close(folder)


def _connect_if_alive(place: Place) -> tuple[socket.socket, str] | None:
    """(socket, the keeper's process identity), or None when no keeper lives there."""
    # A socket alone proves nothing: a child that was forked while it was made may hold it open for ever.
    identity = _living(place)
    if not identity:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _reached(place, "sock") as path:
            sock.connect(path)
    except OSError:
        sock.close()
        return None
    uid = peer(sock)[1]
    if uid != os.geteuid():
        sock.close()
        raise KeeperError(f"{place.path('sock')}: belongs to a process of user {uid}, not {os.geteuid()}; remove it")
    return sock, identity


def _living(place: Place) -> str:
    """The identity of the process that the lock file names, while it lives; else ""."""
    identity = _read(place.path("lock")).decode(errors="replace")
    pid = identity.partition(".")[0]
    return identity if pid.isdecimal() and process_identity(int(pid)) == identity else ""


def living_pid(place: Place) -> int | None:
    """The pid of the place's keeper, whether it answers or not; None when there is none."""
    return int(_living(place).partition(".")[0] or 0) or None


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end. A listening socket's is whoever bound it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(raw[0:4], sys.byteorder), int.from_bytes(raw[4:8], sys.byteorder)


def _spawn(place: Place) -> None:
    """Start the keeper; the caller holds the lock."""
    if not sys.executable:
        raise KeeperError("this Python does not know its own executable, so the keeper cannot be started")
    for suffix in ("sock", "secret"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place.path(suffix))
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    secret = os.open(place.path("secret"), flags | os.O_EXCL, 0o600)
    with open(secret, "wb") as file:
        file.write(secrets.token_bytes(SECRET_NBYTES))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with _reached(place, "sock") as path:
            listener.bind(path)
        listener.listen(128)
        log = os.open(place.path("log"), flags | os.O_APPEND, 0o600)
        try:
            fd = listener.fileno()
            process = subprocess.Popen(
                # -P: a folder of the user that happens to be called ckpt must not be taken for the package.
                [sys.executable, "-P", "-m", "ckpt.keeper", f"--fd={fd}", f"--folder={place.folder}",
                 f"--key={place.key}", f"--job={place.job}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                start_new_session=True,
                pass_fds=(fd,),
            )  # fmt: skip
        except OSError as error:
            raise KeeperError(f"the keeper cannot be started: {sys.executable}: {error.strerror}") from error
        finally:
            os.close(log)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        # This rank may have pinned itself to a few cores; the keeper works for all ranks of the agent.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process.pid, os.sched_getaffinity(os.getppid()))
    # The keeper outlives whoever started it; should it end before, somebody has to take note of it.
    threading.Thread(target=process.wait, name="ckpt-keeper-reaper", daemon=True).start()
    with open(place.path("lock"), "w") as lock:
        lock.write(process_identity(process.pid))


def _environment() -> dict[str, str]:
    """Ours, with the folder that holds ``ckpt`` on the path if it would not be found there anyway."""
    environment = dict(os.environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{known}{os.pathsep}{root}" if known else root
    return environment


def _shake_hands(sock: socket.socket, secret: bytes, rank: int | None, identity: str, deadline: float) -> Link:
    """Prove ourselves and have the keeper prove itself. _GoneError when it dies meanwhile, KeeperError otherwise."""
    frames = protocol.FrameBuffer()
    nonce = secrets.token_bytes(protocol.NONCE_NBYTES)

    def receive() -> None:
        sock.settimeout(_LOOK_AGAIN_S)
        while True:
            try:
                received = sock.recv(1 << 16)
            except TimeoutError:
                if process_identity(int(identity.partition(".")[0])) != identity:
                    raise _GoneError from None
                if time.monotonic() > deadline:
                    raise KeeperError(f"the keeper (process {identity}) lives but does not answer") from None
                continue
            except OSError:
                raise _GoneError from None
            if not received:
                raise _GoneError
            frames.feed(received)
            return

    def answer() -> protocol.FromKeeper:
        while (body := frames.frame()) is None:
            receive()
        message = protocol.message_of(body, protocol.from_keeper)
        if isinstance(message, protocol.Failed):
            raise error_from_kind(message.kind, message.message)
        return message

    try:
        sock.sendall(protocol.PREAMBLE + protocol.pack(protocol.Hello(nonce)))
        while (line := frames.line()) is None:
            receive()
        if line != protocol.PREAMBLE:
            raise KeeperError(
                f"the keeper (process {identity}) speaks {line!r}, this process {protocol.PREAMBLE!r}: "
                "another version of ckpt started it; it ends with its job"
            )
        challenge = answer()
        if not isinstance(challenge, protocol.Challenge):
            raise KeeperError(f"the keeper answers {type(challenge).__name__} to Hello")
        if not protocol.same(challenge.proof, protocol.prove(secret, "keeper", nonce, challenge.nonce)):
            raise KeeperError("the process that listens does not know the keeper's secret; nothing was sent to it")
        proof = protocol.prove(secret, "client", nonce, challenge.nonce)
        sock.sendall(protocol.pack(protocol.Answer(proof, rank)))
        welcome = answer()
    except BrokenPipeError:
        raise _GoneError from None
    if not isinstance(welcome, protocol.Welcome):
        raise KeeperError(f"the keeper answers {type(welcome).__name__} to the proof")
    frames.limit_nbytes = protocol.FRAME_LIMIT_NBYTES
    sock.settimeout(None)
    return Link(sock, frames, welcome.pid, welcome.job)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(4096)
    except FileNotFoundError:
        return b""


def _read_secret(place: Place) -> bytes | None:
    secret = _read(place.path("secret"))
    return secret if len(secret) == SECRET_NBYTES else None


def _log_tail(place: Place) -> str:
    with contextlib.suppress(OSError), open(place.path("log"), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 600))
        return file.read().decode(errors="replace").strip() or "(nothing)"
    return "(no log)"
