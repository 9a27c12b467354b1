"""Runs that somebody has prepared to do harm, and every verb that reads them, in one child process that is watched.

``python -m tests.security.hostile MODULE FOLDER`` runs all attacks of a module (``ATTACKS`` in it: name -> Attack), and
prints a JSON line for each. An attack is carried out on step 2 of a small run of two; what it changes is pinned anew by
digest, as an author with bad intent would, so digests protect from nothing here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ckpt.errors import CkptError
from ckpt.format import records
from ckpt.format.commit import COMMIT, Attempt
from ckpt.format.layout import layout_key
from ckpt.format.values import TensorRef
from ckpt.run import Run
from ckpt.testing.handmade import HandTensor, write_step

ROOT = Path(__file__).parent.parent.parent
MARKER = "CKPT_TEST_MARKER"  # names the file that code from a checkpoint would make
ROOM_MIB = 200
WORDS = {"fault of ckpt itself", "Traceback"}  # of which nothing may be heard


class Attack(msgspec.Struct, frozen=True):
    """What is done to a run; ``harmless``: nothing that readers use is touched, so all of them go on as before.

    ``unseen``: verbs that need not notice. ``spread``: step 1 is hit too, so that nothing is left to fall back on.
    """

    act: Callable[[Hostile], None]
    harmless: bool = False
    unseen: frozenset[str] = frozenset()
    spread: bool = False
    says: str = ""  # what explicit load, or verify, says of it


class Heard(msgspec.Struct, frozen=True):
    """What came of one verb."""

    verb: str
    code: int  # 0, or the exit code of the error
    text: str
    seconds: float  # of processor time; what waits for ever is found by the time that all have together
    mib: int  # over the start


class Outcome(msgspec.Struct, frozen=True):
    """What came of one attack."""

    attack: str
    heard: tuple[Heard, ...]
    ran_code: bool
    escaped: tuple[str, ...]  # files outside of the run that were changed or made

    def of(self, verb: str) -> Heard:
        """What one verb said."""
        return next(heard for heard in self.heard if heard.verb == verb)


class Pickled:
    """Unpickling it makes the marker: code from a checkpoint has run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import os; open(os.environ['{MARKER}'], 'w').close()",)


class Hostile:
    """A run of two steps, and the second one's files laid open."""

    def __init__(self, path: Path, *, encoding: str = "raw") -> None:
        self.path = path
        run = Run.open(path)
        self.tensors = [
            HandTensor("model.w", "float32", (64, 16), bytes(range(256)) * 16, "model"),
            HandTensor("x", "uint8", (8,), bytes(8)),
        ]
        self.attempts = [self._write(run, step, encoding) for step in (1, 2)]
        self.attempt: Attempt = self.attempts[1]
        self.folder = path / self.attempt.folder
        self.outside = path.parent / "outside"
        self.outside.mkdir()

    def _write(self, run: Run, step: int, encoding: str) -> Attempt:
        values = {"model.w": TensorRef("model.w"), "x": TensorRef("x"), "epoch": step}
        return write_step(run, step, self.tensors, values=values, encoding=encoding)

    @property
    def part_path(self) -> Path:
        """Of rank 0."""
        return self.folder / "part-00000-of-00001.json"

    @property
    def layout_path(self) -> Path:
        """The layout of both steps."""
        return next((self.path / "layouts").iterdir())

    @property
    def data_path(self) -> Path:
        """A data file."""
        return next(path for path in self.folder.iterdir() if path.name.startswith("model-"))

    def part(self) -> dict[str, Any]:
        """Rank 0's part, to be changed."""
        found: dict[str, Any] = json.loads(self.part_path.read_bytes())
        return found

    def layout(self) -> dict[str, Any]:
        """The layout, to be changed."""
        found: dict[str, Any] = json.loads(self.layout_path.read_bytes())
        return found

    def commit(self) -> dict[str, Any]:
        """COMMIT, to be changed."""
        found: dict[str, Any] = json.loads((self.folder / COMMIT).read_bytes().split(b"\n")[0])
        return found

    def put_commit(self, commit: dict[str, Any] | bytes) -> None:
        """COMMIT of these fields, sealed."""
        line = commit if isinstance(commit, bytes) else compact(commit)
        (self.folder / COMMIT).write_bytes(line + b"\n" + records.digest(line).encode() + b"\n")

    def put_part(self, part: dict[str, Any] | bytes, **commit: Any) -> None:
        """A part, pinned by COMMIT, of which ``commit`` changes more."""
        raw = part if isinstance(part, bytes) else compact(part)
        self.part_path.write_bytes(raw)
        pinned = self.commit() | commit
        pinned["parts"][0] |= {"nbytes": len(raw), "digest": records.digest(raw)}
        self.put_commit(pinned)

    def put_layout(self, layout: dict[str, Any] | bytes, **part: Any) -> None:
        """A layout of its own for this step, named by the part, of which ``part`` changes more, and by COMMIT."""
        raw = layout if isinstance(layout, bytes) else compact(layout)
        digest = records.digest(raw)
        commit = self.commit()
        commit["layouts"][0] |= {"digest": digest, "nbytes": len(raw)}
        found = self.part() | {"layout": digest} | part
        (self.path / layout_key(digest)).write_bytes(raw)
        self.put_part(found, layouts=commit["layouts"])

    def put_file(self, index: int, raw: bytes | None = None, **fields: Any) -> None:
        """A data file with other bytes or another entry in its part."""
        part = self.part()
        if raw is not None:
            (self.folder / part["files"][index]["name"]).write_bytes(raw)
        part["files"][index] |= fields
        self.put_part(part)


def compact(tree: Any) -> bytes:
    """JSON as ckpt writes it."""
    return json.dumps(tree, separators=(",", ":")).encode()


# -- the child ---------------------------------------------------------------------------------------


def verbs(path: str, work: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every way of reading a run, (name, act); a command line's act gives its exit code and what it said."""
    import torch

    import ckpt
    from ckpt.cli import VERBS

    def state() -> dict[str, Any]:
        return {"model.w": torch.zeros(64, 16), "x": torch.zeros(8, dtype=torch.uint8), "epoch": 0}

    def load(**options: Any) -> str:
        target = state()
        report = ckpt.load(path, target, **options)
        epoch = target["epoch"]
        return f"step {report.step}, epoch {epoch if type(epoch) is int and epoch < 9 else type(epoch).__name__}"

    yield "load", lambda: load(step=2)
    yield "load latest", load
    yield "read", lambda: str(sorted(ckpt.read(path, step=2)))
    yield "latest", lambda: str(ckpt.latest(path))
    yield "steps", lambda: str(ckpt.steps(path))
    yield "verify()", lambda: str(ckpt.verify(path, 2).problems)
    lines = [
        ("ls", path, "--all"), ("show", path, "--step", "2"), ("show --json", path, "--step", "2"),
        ("verify", path, "--step", "2"),
        ("verify --all", path), ("diff", path, "1", "2"), ("restore", path, str(work / "restored"), "--step", "2"),
        ("restore --format torch", path, str(work / "torch"), "--step", "2"), ("prune --dry-run", path),
        ("copy", path, str(work / "copied"), "--step", "2"), ("repair", path, "--step", "2"),
        ("rollback", path, "--to", "1"),
    ]  # fmt: skip
    for words, *rest in lines:
        verb, *flags = words.split()
        if verb in VERBS:
            yield words, lambda line=[verb, *flags, *rest]: _command(line)


def _command(line: list[str]) -> tuple[int, str]:
    from ckpt.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line)
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue() + err.getvalue()


def _hear(verb: str, act: Callable[[], Any]) -> Heard:
    before = _rss_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    started = time.process_time()
    code = 0
    try:
        said = act()
        if isinstance(said, tuple):
            code, said = said
    except CkptError as error:
        code, said = error.exit_code, f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 - this is what the tests look for
        code, said = 1, f"Traceback: {type(error).__name__}: {error}"
    return Heard(verb, code, said[:4000], time.process_time() - started, _status("VmHWM") - before)


def _rss_mib() -> int:
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) >> 10
    raise AssertionError(field)


def _files(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_mode, stat.st_size, stat.st_mtime_ns)
    return found


def _carry_out(name: str, attack: Attack, folder: Path) -> Outcome:
    folder.mkdir()
    marker = folder / "marker"
    os.environ[MARKER] = str(marker)
    work = folder / "work"
    work.mkdir()
    hostile = Hostile(folder / "run", encoding="zstd" if name.startswith("zstd") else "raw")
    attack.act(hostile)
    before, beside = _files(hostile.outside), {path.name for path in folder.iterdir()}
    heard = tuple(_hear(verb, act) for verb, act in verbs(str(hostile.path), work))
    now = _files(hostile.outside)
    changed = [path for path in now if now[path] != before.get(path)] + [path for path in before if path not in now]
    changed += [path.name for path in folder.iterdir() if path.name not in beside | {marker.name}]
    return Outcome(name, heard, marker.exists(), tuple(changed))


def main() -> int:
    """In the child."""
    module, folder = sys.argv[1], Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    attacks: dict[str, Attack] = importlib.import_module(module).ATTACKS
    warm = _carry_out("warm", Attack(lambda _: None), folder / "warm")  # imports, and buffers that stay
    assert not any(heard.code not in {0, 1} for heard in warm.heard), warm
    for number, (name, attack) in enumerate(attacks.items()):
        sys.stdout.buffer.write(msgspec.json.encode(_carry_out(name, attack, folder / str(number))) + b"\n")
        sys.stdout.flush()
    return 0


def carried_out(module: str, folder: Path, timeout_s: float = 400.0) -> dict[str, Outcome]:
    """All attacks of a module, carried out in a child: name -> outcome. Fails when the child does not come back."""
    with open(folder / "said", "wb") as said, open(folder / "complained", "wb") as complained:
        command = [sys.executable, "-m", "tests.security.hostile", module, str(folder)]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "CKPT_JOB": str(folder), "COLUMNS": "200"}
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=complained, cwd=ROOT, env=environment
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            code = None
    lines = (folder / "said").read_text().splitlines()
    found = [msgspec.json.decode(line, type=Outcome) for line in lines]
    told = (folder / "complained").read_text()[-3000:]
    assert code == 0, f"ended with {code} (None: hung) after {[outcome.attack for outcome in found][-1:]}: {told}"
    return {outcome.attack: outcome for outcome in found}


def check(attack: Attack, outcome: Outcome) -> None:
    """What must hold whatever the attack: no code, nothing outside, no surprise, bounds kept, and it is noticed."""
    assert not outcome.ran_code, "code from the checkpoint ran"
    assert not outcome.escaped, f"changed outside of the run: {outcome.escaped}"
    for heard in outcome.heard:
        what = f"{heard.verb}: {heard}"
        assert not any(word in heard.text for word in WORDS), what
        assert heard.mib < ROOM_MIB, what
        assert heard.seconds < 20, what
        assert "\x1b" not in heard.text, what
    load, latest = outcome.of("load"), outcome.of("load latest")
    if attack.harmless:
        assert (load.code, load.text) == (0, "step 2, epoch 2"), load
        return
    if "load" not in attack.unseen:
        assert load.code in {3, 4, 5, 8}, load
    if "verify" not in attack.unseen:
        assert outcome.of("verify").code in {3, 4, 5, 8}, outcome.of("verify")
    if attack.says:
        told = load.text + outcome.of("verify()").text
        assert attack.says in told, told
    if not attack.spread and "load" not in attack.unseen:
        assert (latest.code, latest.text) == (0, "step 1, epoch 1"), latest


if __name__ == "__main__":
    sys.exit(main())
