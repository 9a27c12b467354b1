"""Every error that ckpt raises on purpose, with the exit code of the command line.

Each message says what was found, what was expected, where, and what to do::

    CkptError                      1   anything not named below
    ├── BadInputError              2   an argument or a state that ckpt cannot take
    │   └── UnsupportedValueError  2   a value without a typed form, refused before a byte is written
    ├── NotFoundError              3   no such run, no such step
    ├── DamagedError               4   bytes that are not what COMMIT pinned
    ├── UnsupportedFormatError     5   a version or a feature that this reader does not know
    ├── FencedError                6   a newer writer holds the run
    ├── SaveFailedError            7   a save that did not become a step
    ├── StoreError                 8   the storage refused, failed or is full
    │   └── AlreadyExistsError     8   create-only put of a key that exists
    ├── MismatchError              9   stored and wanted tensors differ
    ├── KeeperError               10   the keeper process is gone or answers nonsense
    ├── RankError                 11   another rank failed; the message names it
    └── Preempted                 75   stopped by SIGTERM after a last save (EX_TEMPFAIL: start again)
"""

from __future__ import annotations

__all__ = [
    "AlreadyExistsError",
    "BadInputError",
    "CkptError",
    "DamagedError",
    "FencedError",
    "KeeperError",
    "MismatchError",
    "NotFoundError",
    "Preempted",
    "RankError",
    "SaveFailedError",
    "StoreError",
    "UnsupportedFormatError",
    "UnsupportedValueError",
    "error_from_kind",
]


class CkptError(Exception):
    """The root of the tree; ``exit_code`` is what ``ckpt`` and the trainer exit with.

    Messages quote what others wrote (names, jobs, hosts), and end up on terminals: as text they are ``printable``.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class BadInputError(CkptError):
    """An argument, or a state, that ckpt cannot take as it is."""

    exit_code = 2


class UnsupportedValueError(BadInputError):
    """A value in the state that has no typed form; raised at save, before a byte is written."""


class NotFoundError(CkptError):
    """There is definitely no such run, step or key (never raised for a store that merely fails)."""

    exit_code = 3


class DamagedError(CkptError):
    """Stored bytes are not the bytes that COMMIT pinned."""

    exit_code = 4


class UnsupportedFormatError(CkptError):
    """A format version or a feature that this reader does not know."""

    exit_code = 5


class FencedError(CkptError):
    """A newer writer holds the run; this one has stopped and wrote no COMMIT."""

    exit_code = 6


class SaveFailedError(CkptError):
    """A save that did not become a step; earlier steps are untouched."""

    exit_code = 7


class StoreError(CkptError):
    """The storage refused, failed or is full."""

    exit_code = 8


class AlreadyExistsError(StoreError):
    """A create-only put of a key that exists."""


class MismatchError(CkptError):
    """The stored tensors are not the wanted ones: missing, unexpected, or of other shape or dtype."""

    exit_code = 9


class KeeperError(CkptError):
    """The keeper process is gone, cannot be started, or broke the protocol."""

    exit_code = 10


class RankError(CkptError):
    """Another rank failed; the message says which and why."""

    exit_code = 11


class Preempted(CkptError, SystemExit):  # noqa: N818 - not a fault: the run stopped as asked
    """The run was stopped by SIGTERM and its last step is saved; start it again to go on.

    It is a ``SystemExit`` too, so that a training script which does not catch it
    ends with exit code 75 and without a traceback.
    """

    exit_code = 75

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.code = self.exit_code


def printable(text: str, keep: str = "") -> str:
    """``text`` with escapes for what a terminal would obey or hide: control sequences, line ends, bidirectional marks.

    As ``repr`` writes them, without its quotes. Characters in ``keep`` stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


_KINDS: dict[str, type[CkptError]] = {
    cls.__name__: cls
    for cls in (
        CkptError, BadInputError, UnsupportedValueError, NotFoundError, DamagedError,
        UnsupportedFormatError, FencedError, SaveFailedError, StoreError, AlreadyExistsError,
        MismatchError, KeeperError, RankError, Preempted,
    )
}  # fmt: skip


def error_from_kind(kind: str, message: str) -> CkptError:
    """The error of class name ``kind``, for errors that crossed a process boundary."""
    return _KINDS.get(kind, CkptError)(message)
