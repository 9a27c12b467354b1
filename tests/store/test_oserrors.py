from __future__ import annotations

import errno
import os

import pytest

from ckpt.errors import AlreadyExistsError, NotFoundError, StoreError
from ckpt.store.oserrors import quantity, store_error


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1,000 bytes (1.0 kB)"),
        (3_145_728, "3,145,728 bytes (3.1 MB)"),
        (2_000_000_000, "2,000,000,000 bytes (2.0 GB)"),
    ],
)
def test_quantity(nbytes, text):
    """Bytes are told exactly, and rounded where that helps."""
    assert quantity(nbytes) == text


def test_a_full_disk_says_where_how_far_and_what_to_do():
    """One whole sentence, as a user sees it."""
    error = store_error("RUN/step/model", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "write", "after 5 bytes")
    assert type(error) is StoreError
    assert str(error) == (
        "RUN/step/model: cannot write: no space left on the device after 5 bytes; "
        "free space or choose another place for the run; earlier steps are untouched"
    )


def test_reading_says_nothing_of_steps():
    """Only writing can have put earlier steps in doubt."""
    error = store_error("RUN/key", OSError(errno.EIO, os.strerror(errno.EIO)), "read")
    assert str(error) == (
        "RUN/key: cannot read: the device reports an I/O error; check the disk or the network mount (dmesg)"
    )


def test_an_unknown_errno_keeps_its_own_words():
    """What has no sentence here is told as the system says it, with its name; a message of its own is kept too."""
    odd = str(store_error("k", OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), "read"))
    assert "Connection timed out (ETIMEDOUT); see the cause" in odd
    assert "I/O error (boom)" in str(store_error("k", OSError(errno.EIO, "boom"), "read"))
    assert "just text (no errno);" in str(store_error("k", OSError("just text"), "read"))


def test_absent_and_taken():
    """ENOENT is an absence when reading and a fault when writing; EEXIST is what create-only means."""
    absent = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert type(store_error("k", absent, "read")) is NotFoundError
    assert type(store_error("k", absent, "write")) is StoreError
    assert type(store_error("k", OSError(errno.EEXIST, "taken"), "write")) is AlreadyExistsError
