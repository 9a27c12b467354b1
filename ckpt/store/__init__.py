"""Stores: keys to bytes. ``open_store(url)`` gives the one for a path or URL.

Every store takes a ``/``-separated key, says NotFoundError only on a definite answer, and is durable
when a call returns. The interface is ``ckpt.store.base``; its tests are ``ckpt.testing.StoreTests``.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import cast
from urllib.parse import unquote

from ckpt.errors import BadInputError
from ckpt.store.base import Sink, Source, Store
from ckpt.store.local import LocalStore

__all__ = ["LocalStore", "Sink", "Source", "Store", "open_store"]

TEST_STORE_ENV = "CKPT_TEST_STORE"  # JSON; wraps every store this process opens, see ckpt.testing

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z0-9+.-]+)*)://")
_COLLAPSED = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|adl|hf|http|https|memory|file):/(?!/)")
_SUPPORTED = "a path, or a file:// URL"


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a path or URL; nothing is created, and nothing read but the root's kind.

    A path is taken as it is (``~`` stands for itself) and made absolute, as ``store.url``.
    Raises BadInputError for an empty path, a URL that no store takes, and a root that is no folder.
    """
    store: Store = LocalStore(_local_path(url))
    spec = os.environ.get(TEST_STORE_ENV)
    if spec:
        # By name, so that no room depends on the testing room; the keeper is reached this way too.
        store = cast("Store", importlib.import_module("ckpt.testing").wrap(store, spec))
    return store


def _local_path(url: str | os.PathLike[str]) -> str:
    is_path = not isinstance(url, str)
    text = os.fsdecode(os.fspath(url))
    if not text or "\0" in text:
        raise BadInputError(f"{text!r}: no place for a run; give {_SUPPORTED}")
    if is_path:
        if _COLLAPSED.match(text):
            raise BadInputError(f"{text}: a Path turned the // of a URL into /; give the URL as a str")
        return text
    scheme = _SCHEME.match(text)
    if scheme is None:
        return text
    if scheme[1].lower() != "file":
        raise BadInputError(f"{text}: no store takes {scheme[1]}:// URLs; supported: {_SUPPORTED}")
    host, slash, rest = text[scheme.end() :].partition("/")
    if host not in {"", "localhost"} or not slash:
        raise BadInputError(f"{text}: a file URL has three slashes and an absolute path, file:///data/run")
    return unquote("/" + rest)
