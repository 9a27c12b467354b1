"""What fuzzing has found interesting is tried again, with bounds on time and memory."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.fuzz.__main__ import CORPUS, ROOM_MIB, corpus_of
from tests.fuzz.targets import TARGETS
from tests.security.hostile import ROOT

LIMIT_NBYTES = 1 << 20
SLOW_S = 2.0  # of processor time, for inputs of some kilobytes; a hang, not slowness, is what this is about


def test_every_target_has_a_small_corpus():
    """It is kept beside the tests, and stays small."""
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    sizes = [path.stat().st_size for name in TARGETS for path in corpus_of(name)]
    assert all(corpus_of(name) for name in TARGETS)
    assert sum(sizes) < LIMIT_NBYTES
    assert len(sizes) < 600


def test_the_corpus_again():
    """Each input in a process that is watched: only CkptErrors, no more than 200 MiB over the start, no hang."""
    command = [sys.executable, "-m", "tests.fuzz", "--replay"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^(\w+) (\d+) inputs, slowest ([0-9.]+) s, (\d+) MiB over start$", done.stdout, re.MULTILINE)
    assert {name for name, *_ in rows} == set(TARGETS)
    for name, count, slowest, mib in rows:
        assert int(count) == len(corpus_of(name))
        assert int(mib) < ROOM_MIB, (name, mib)
        assert float(slowest) < SLOW_S, (name, slowest)
