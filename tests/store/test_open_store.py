from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.errors import BadInputError
from ckpt.store import LocalStore, open_store


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("/data/run", "/data/run"),
        ("/data//run/../other/", "/data/other"),
        (Path("/data/run"), "/data/run"),
        ("file:///data/run", "/data/run"),
        ("FILE://localhost/data/run", "/data/run"),
        ("file:///data/a%20b/100%25", "/data/a b/100%"),
        ("/data/a%20b", "/data/a%20b"),
        ("/data/s3://odd", "/data/s3:/odd"),
        ("/data/~", "/data/~"),
        ("/data/a#b?c", "/data/a#b?c"),
    ],
)
def test_paths_and_file_urls(url, place):
    """A path is taken literally, a file URL is decoded; the store's own URL is the absolute path."""
    store = open_store(url)
    assert isinstance(store, LocalStore)
    assert store.url == place
    assert open_store(store.url).url == place


def test_a_path_survives_its_uri(tmp_path):
    """``Path.as_uri`` and ``open_store`` understand each other for any name."""
    place = tmp_path / "100% é #1?"
    assert open_store(place.as_uri()).url == str(place)


def test_a_relative_path(tmp_path, monkeypatch):
    """A relative path is made absolute, for it is opened again in another process."""
    monkeypatch.chdir(tmp_path)
    assert open_store("run").url == str(tmp_path / "run")
    assert open_store(os.curdir).url == str(tmp_path)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b/r", "simplecache::s3://b/r", "HTTP://host/x"])
def test_other_schemes_are_refused(url):
    """No run is ever written to a folder called ``s3:``; the error names the scheme and what is supported."""
    with pytest.raises(BadInputError, match=rf"{url.partition('://')[0]}:// URLs.*supported: a path, a file:// URL"):
        open_store(url)


def test_buckets_go_through_fsspec_on_request():
    """The error says how."""
    with pytest.raises(BadInputError, match=r"fsspec\+s3:// goes through fsspec"):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("url", ["", "a\0b"])
def test_no_place(url):
    """An empty path is no place, and not the current folder either."""
    with pytest.raises(BadInputError, match="no place for a run"):
        open_store(url)


@pytest.mark.parametrize("url", ["file://data/run", "file://", "file://host"])
def test_a_file_url_with_a_host(url):
    """Two slashes make the first folder a host; that is told, not followed."""
    with pytest.raises(BadInputError, match="three slashes"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///data/run"])
def test_a_url_made_a_path(url):
    """``Path`` eats a slash of a URL; the mistake is named."""
    with pytest.raises(BadInputError, match="give the URL as a str"):
        open_store(Path(url))
