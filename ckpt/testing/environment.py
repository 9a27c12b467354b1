"""Wrappers by environment variable, so that a test reaches the stores of other processes.

``CKPT_TEST_STORE`` is JSON: one object, or a list of them (the first lies next to the real store, the last is
outermost), each with ``"wrap"`` and the keyword arguments of that wrapper::

    {"wrap": "faulty", "match": "part-*", "operation": "create", "errno": "ENOSPC", "on_nth": 2}
    {"wrap": "slow", "delay_s": 0.5, "match": "*.safetensors"}
    {"wrap": "short", "most_nbytes": 1000}
    {"wrap": "recording", "log": "/path/file"}
    {"wrap": "blocking", "match": "COMMIT", "release": "/path/go", "waiting": "/path/waiting"}
    {"wrap": "crash", "at": 17, "log": "/path/file"}

``"program"`` limits a wrapper to processes whose command line contains that word, as ``"keeper"``. Counts run over
all stores that a process opens.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ckpt.errors import BadInputError
from ckpt.store import TEST_STORE_ENV, LocalStore, Store
from ckpt.testing.crashing import CrashStore
from ckpt.testing.faults import BlockingStore, FaultyStore, ShortStore, SlowStore
from ckpt.testing.recording import RecordingStore
from ckpt.testing.wrapped import Tally, WrappedStore

_WRAPPERS: dict[str, type[WrappedStore]] = {
    "blocking": BlockingStore,
    "crash": CrashStore,
    "faulty": FaultyStore,
    "recording": RecordingStore,
    "short": ShortStore,
    "slow": SlowStore,
}
_tallies: dict[tuple[str, int], Tally] = {}  # by the variable's text and place in its list


def store_env(*specs: dict[str, Any]) -> dict[str, str]:
    """The environment variable for these wrappers: ``env={**os.environ, **store_env({"wrap": "slow", ...})}``.

    Paths may be given as Path. Raises BadInputError for a wrapper or an option that does not exist.
    """
    text = json.dumps(list(specs), default=os.fspath)
    for spec in _parse(text):
        _wrapped(LocalStore(os.curdir), spec, Tally())
    return {TEST_STORE_ENV: text}


def wrap(store: Store, text: str) -> Store:
    """The store within the wrappers that ``text`` asks for. Called by ``open_store``."""
    for place, spec in enumerate(_parse(text)):
        if spec.get("program", "") in " ".join(sys.orig_argv):
            store = _wrapped(store, spec, _tallies.setdefault((text, place), Tally()))
    return store


def _wrapped(store: Store, spec: dict[str, Any], tally: Tally) -> Store:
    options = {name: value for name, value in spec.items() if name not in {"wrap", "program"}}
    try:
        return _WRAPPERS[spec["wrap"]](store, tally=tally, **options)
    except TypeError as error:
        raise BadInputError(f"{TEST_STORE_ENV}: {spec['wrap']}: {error}") from error


def _parse(text: str) -> list[dict[str, Any]]:
    try:
        specs = json.loads(text)
    except ValueError as error:
        raise BadInputError(f"{TEST_STORE_ENV} is not JSON ({error}): {text}") from error
    specs = specs if isinstance(specs, list) else [specs]
    for spec in specs:
        if not isinstance(spec, dict) or spec.get("wrap") not in _WRAPPERS:
            raise BadInputError(f'{TEST_STORE_ENV}: expected objects with "wrap" one of {sorted(_WRAPPERS)}: {text}')
    return specs
