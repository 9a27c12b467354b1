"""``python -m tests.fuzz [TARGET ...] --executions 1000000``: coverage-guided fuzzing, a process for each target.

Prints a table: executions, executions a second, memory over the start, what was found. Exit code 1 when something was:
the input is kept in ``fuzz-out/<target>``. ``--keep`` puts some of what was interesting into the corpus.
``--replay`` runs the corpus instead, without atheris. Needs ``pip install -e '.[fuzz]'``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOM_MIB = 200  # over the start
INPUT_TIMEOUT_S = 5
MAX_INPUT_NBYTES = 4096
KEPT_PER_TARGET = 24
KEPT_NBYTES = 40_000  # of a target
CORPUS = Path(__file__).parent / "corpus"
OUT = Path("fuzz-out")
_BEGAN = time.monotonic()

# What coverage is counted in: the parsers, and what they stand on.
INSTRUMENTED = [
    "ckpt.format",
    "ckpt.keeper.protocol",
    "ckpt.keeper.persist",
    "ckpt.keeper.connection",
    "ckpt.plan",
    "ckpt.reading.tree",
]


def main() -> int:
    """Run one target inside this process, or all that are asked for, each in a child."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all")
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep some of what was interesting in the corpus")
    parser.add_argument("--replay", action="store_true", help="run the corpus, and print time and memory")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        return _inside(arguments.targets[0], arguments.inside)
    if arguments.replay:
        return _replay(arguments.targets)
    from tests.fuzz.targets import TARGETS

    names = arguments.targets or list(TARGETS)
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    print(f"{'target':<20} {'executions':>11} {'per second':>11} {'MiB over start':>15}  found")
    outcomes = [_fuzz(name, arguments) for name in names]
    print("no findings" if all(outcomes) else "see above")
    return 0 if all(outcomes) else 1


def corpus_of(name: str) -> list[Path]:
    """The kept inputs of a target."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())


def _fuzz(name: str, arguments: argparse.Namespace) -> bool:
    found = OUT / name
    with tempfile.TemporaryDirectory(prefix="ckpt-fuzz-") as folder:
        seeds = Path(folder, "seeds")
        new = Path(folder, "new")
        for path in (found, seeds, new):
            path.mkdir(parents=True, exist_ok=True)
        _write_seeds(name, seeds)
        flags = [
            str(new), str(seeds), f"-runs={arguments.executions}", f"-seed={arguments.seed}",
            f"-timeout={INPUT_TIMEOUT_S}",
            f"-max_len={MAX_INPUT_NBYTES}", "-print_final_stats=1", f"-artifact_prefix={found}/", "-verbosity=0",
            "-len_control=0",
        ]  # fmt: skip
        started = time.monotonic()
        done = _child(name, flags)
        seconds = time.monotonic() - started - float(_stat(done.stdout, r"started in ([0-9.]+) s"))
        said = done.stdout + done.stderr
        start = int(_stat(said, r"start rss: (\d+) MiB"))
        peak = int(_stat(said, r"peak_rss_mb:\s+(\d+)"))
        executions = int(_stat(said, r"number_of_executed_units:\s+(\d+)"))
        problem = "" if done.returncode == 0 else said[-3000:]
        rate = executions / max(seconds, 0.001)
        verdict = "see below" if problem else "nothing"
        print(f"{name:<20} {executions:>11,} {rate:>11,.0f} {peak - start:>15,}  {verdict}", flush=True)
        if problem:
            print(problem)
        elif arguments.keep:
            _keep(name, new)
        with contextlib.suppress(OSError):  # something was found, or another run uses it
            found.rmdir()
        return not problem


def _child(name: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", name, "--inside", *flags]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _stat(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else "0"


def _write_seeds(name: str, folder: Path) -> None:
    from tests.fuzz.targets import TARGETS

    kept = [path.read_bytes() for path in corpus_of(name)]
    for raw in [*TARGETS[name].seeds(), *kept]:
        Path(folder, hashlib.blake2b(raw, digest_size=8).hexdigest()).write_bytes(raw)


def _keep(name: str, new: Path) -> None:
    """Of what reached something new, small ones and large ones."""
    inputs = sorted((path.read_bytes() for path in new.iterdir()), key=lambda raw: (len(raw), raw))
    chosen = inputs[:: max(1, -(-len(inputs) // KEPT_PER_TARGET))]
    while sum(map(len, chosen)) > KEPT_NBYTES:
        chosen.pop()
    shutil.rmtree(CORPUS / name, ignore_errors=True)
    (CORPUS / name).mkdir(parents=True)
    for raw in chosen:
        (CORPUS / name / hashlib.blake2b(raw, digest_size=8).hexdigest()).write_bytes(raw)


def _inside(name: str, flags: list[str]) -> int:
    """In the child: instrument, load the target, and let libFuzzer drive it."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        targets = importlib.import_module("tests.fuzz.targets")
    from tests.fuzz.mutations import chooser

    target = targets.TARGETS[name]
    for raw in target.seeds():
        targets.attempt(target, raw)  # what is imported late counts as the start

    def one(raw: bytes) -> None:
        targets.attempt(target, raw)

    def alter(raw: bytes, limit_nbytes: int, seed: int) -> bytes:
        if seed % 4 == 0:
            return bytes(atheris.Mutate(raw, limit_nbytes))
        return bytes(targets.mutate(target, raw, chooser(seed)))[:limit_nbytes]

    start = peak_mib()
    print(f"start rss: {start} MiB, started in {time.monotonic() - _BEGAN:.1f} s", flush=True)
    program = [sys.argv[0], *flags, f"-rss_limit_mb={start + ROOM_MIB}"]
    atheris.Setup(program, one, custom_mutator=alter)
    atheris.Fuzz()
    return 0


def _replay(names: list[str]) -> int:
    from tests.fuzz.targets import TARGETS, attempt

    for name in names or TARGETS:
        for raw in TARGETS[name].seeds():
            attempt(TARGETS[name], raw)  # what is imported late counts as the start
    for name in names or TARGETS:
        start, slowest = peak_mib(), 0.0
        paths = corpus_of(name)
        for path in paths:
            started = time.process_time()
            attempt(TARGETS[name], path.read_bytes())
            slowest = max(slowest, time.process_time() - started)
        print(f"{name} {len(paths)} inputs, slowest {slowest:.3f} s, {peak_mib() - start} MiB over start", flush=True)
    return 0


def peak_mib() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
