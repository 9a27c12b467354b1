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
_SUPPORTED = "a path, a file:// URL, or a URL that fsspec knows (sftp://, memory://, fsspec+s3://, …)"
_BY_PREFIX = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"}  # through fsspec only where that is asked for
_NO_STORES = {"http", "https", "data"}  # nothing can be listed or written there


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a path or URL; nothing is created, and nothing read but the root's kind.

    A path is taken as it is (``~`` stands for itself) and made absolute, as ``store.url``.
    Raises BadInputError for an empty path, a URL that no store takes, and a root that is no folder; StoreError for a
    storage that cannot be reached.
    """
    address = _fsspec_url(url)
    store: Store = LocalStore(_local_path(url)) if address is None else _fsspec_store(address)
    spec = os.environ.get(TEST_STORE_ENV)
    if spec:
        # By name, so that no room depends on the testing room; the keeper is reached this way too.
        store = cast("Store", importlib.import_module("ckpt.testing").wrap(store, spec))
    return store


def _fsspec_url(url: str | os.PathLike[str]) -> str | None:
    """The URL if it is one for fsspec; BadInputError for a URL that no store takes."""
    scheme = _SCHEME.match(url) if isinstance(url, str) else None
    if scheme is None or scheme[1].lower() == "file":
        return None
    assert isinstance(url, str)
    name, rest = scheme[1].lower(), url[scheme.end() :]
    inner = name.removeprefix("fsspec+")
    if "::" in name or inner in _NO_STORES or name in _BY_PREFIX or "\0" in url:
        hint = f"; fsspec+{name}:// goes through fsspec" if name in _BY_PREFIX else ""
        raise BadInputError(f"{url!r}: no store takes {scheme[1]}:// URLs{hint}; supported: {_SUPPORTED}")
    if inner in {"file", "local"} and not rest.startswith("/"):
        raise BadInputError(f"{url}: a file URL has three slashes and an absolute path, fsspec+file:///data/run")
    return f"{name}://{rest}"


def _fsspec_store(url: str) -> Store:
    """The module is loaded only here: fsspec takes 0.2 s to import."""
    from ckpt.store.fsspec import FsspecStore

    return FsspecStore(url)


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
    host, slash, rest = text[scheme.end() :].partition("/")
    if host not in {"", "localhost"} or not slash:
        raise BadInputError(f"{text}: a file URL has three slashes and an absolute path, file:///data/run")
    return unquote("/" + rest)
