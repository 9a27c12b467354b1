"""Where a job's keeper is found: the job's identity, and a folder that only this user can enter."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator

import msgspec

from ckpt.errors import KeeperError
from ckpt.processes import process_identity

_SCHEDULER_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class Place(msgspec.Struct, frozen=True):
    """One keeper's files, ``<key>.sock`` and so on, in ``folder``."""

    folder: str
    key: str
    job: str = ""  # what it is the key of, for people

    def path(self, suffix: str) -> str:
        """The path of one of its files: ``sock``, ``secret``, ``lock`` or ``log``."""
        return f"{self.folder}/{self.key}.{suffix}"


def here() -> Place:
    """The place of this process's job. KeeperError when no safe folder can be had."""
    job = job_identity()
    key = hashlib.blake2b(job.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return Place(folder=runtime_folder(), key=key, job=job)


def all_places() -> Iterator[Place]:
    """The places of all keepers of this user on this node, dead ones included."""
    folder = runtime_folder()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".sock"):
            yield Place(folder=folder, key=name.removesuffix(".sock"))


_identities: dict[int, str] = {}  # pid -> what it once was: a parent that dies later must not change it


def job_identity() -> str:
    """What the processes of one job on one node have in common, and no other job has.

    ``CKPT_JOB`` if set; else torchelastic's run id with the scheduler's id and the agent, which is the
    parent of all its workers; else this very process.
    """
    named = os.environ.get("CKPT_JOB")
    if named:
        return f"CKPT_JOB={named}"
    pid = os.getpid()
    if pid not in _identities:
        run_id = os.environ.get("TORCHELASTIC_RUN_ID")
        if run_id:
            scheduler = next((f"{name}={os.environ[name]} " for name in _SCHEDULER_IDS if os.environ.get(name)), "")
            _identities[pid] = f"{scheduler}torchelastic={run_id} agent={process_identity(os.getppid())}"
        else:
            _identities[pid] = f"process={process_identity(pid)}"
    return _identities[pid]


def runtime_folder() -> str:
    """The 0700 folder for sockets and secrets: under XDG_RUNTIME_DIR if that is ours, else ``/tmp/ckpt-<uid>``.

    Raises KeeperError for a folder that others own or can write: whoever can write there could
    pose as the keeper.
    """
    above = os.environ.get("XDG_RUNTIME_DIR")
    folder = f"{above}/ckpt" if above and _is_ours(above) else f"/tmp/ckpt-{os.geteuid()}"  # noqa: S108 - checked below
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise KeeperError(f"{folder}: cannot be made for the keeper ({error.strerror}); set XDG_RUNTIME_DIR") from error
    if not _is_ours(folder):
        raise KeeperError(
            f"{folder}: not a folder of user {os.geteuid()} that nobody else can write; "
            "remove it, or set XDG_RUNTIME_DIR to a folder of yours"
        )
    os.chmod(folder, 0o700)
    return folder


def _is_ours(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not writable_by_others
