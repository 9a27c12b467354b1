"""The process that watches a soak: kills, restarts, and checks all the time that nothing is lost, mixed or piled up."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpt
from ckpt.engine.retention import prune
from ckpt.keeper.place import process_identity
from ckpt.run import Run
from ckpt.testing import store_env
from tests.crash.jobs import extremes, keepers_of
from tests.soak.training import KEEP_LAST, PROGRESS_TIMEOUT_S, WORLD, Training, start

MARK = "CKPT_SOAK"  # in the environment of every process of a soak
LINGER_S = 5.0
END_S = 40.0  # how long a rank may take to end when its peer, or its keeper, has gone
LATE_S = 30.0  # how long nothing may be committed while nothing fails
WARM_S = 8.0  # of a process's life; what it has then is what it may keep
GROWTH_NBYTES = 32 << 20
MAX_FDS = 80
MAX_THREADS = 40

KILLS = {"rank 0": 3, "rank 1": 3, "both ranks": 2, "keeper": 3, "ranks and keeper": 1}  # and their weights


class Process:
    """What a process has had of memory and descriptors since it was warm."""

    def __init__(self, what: str, pid: int) -> None:
        self.what = what
        self.pid = pid
        self.identity = process_identity(pid)
        self.since = time.monotonic()
        self.warm_nbytes: int | None = None
        self.nbytes = self.max_nbytes = self.max_fds = self.max_threads = 0

    def look(self) -> None:
        """Measure it, while it is there."""
        with contextlib.suppress(OSError, ValueError, KeyError):  # it may end at any moment
            if process_identity(self.pid) != self.identity:
                return
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
            # Anonymous memory is what leaks; arenas are shared, and counted once, by their keeper.
            self.nbytes = int(fields["RssAnon"].split()[0]) << 10
            self.max_nbytes = max(self.max_nbytes, int(fields["VmRSS"].split()[0]) << 10)
            self.max_threads = max(self.max_threads, int(fields["Threads"]))
            self.max_fds = max(self.max_fds, len(os.listdir(f"/proc/{self.pid}/fd")))
            if self.warm_nbytes is None and time.monotonic() - self.since > WARM_S:
                self.warm_nbytes = self.nbytes

    @property
    def growth_nbytes(self) -> int:
        """Since it was warm; 0 for one that did not live so long."""
        return 0 if self.warm_nbytes is None else self.nbytes - self.warm_nbytes


class Soak:
    """One soak in ``folder``. ``run_for`` does it all; ``wrong`` has a sentence for whatever did not hold."""

    def __init__(self, folder: Path, *, seed: int, every_s: float, calm_s: float) -> None:
        self.folder = folder
        self.run = str(folder / "run")
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.processes: dict[int, Process] = {}
        self.max_folders = 0
        self.latest = -1
        self.told: dict[int, str] = {}  # step -> the attempt that a rank was told is committed
        self._random = random.Random(seed)
        self._every_s, self._calm_s = every_s, calm_s
        self._starts = itertools.count(1)
        self._ranks: list[Any] = []
        self._read: Counter[str] = Counter()  # journal -> bytes that were read of it
        self._progress_at = time.monotonic()
        self._errors, self._hangs = folder / "errors-asleep", folder / "hang-asleep"
        for asleep in (self._errors, self._hangs):
            asleep.touch()
        self._environment = {
            "XDG_RUNTIME_DIR": str(folder),
            "CKPT_JOB": "soak",
            "CKPT_LINGER_S": str(LINGER_S),
            MARK: str(folder),
            **self._faults(),
        }
        os.environ["XDG_RUNTIME_DIR"] = str(folder)

    def _faults(self) -> dict[str, str]:
        """Of the keeper's store: I/O errors, no space, delays, and what hangs while ``hang-asleep`` is not there."""
        of_keeper = {"program": "ckpt.keeper"}
        faulty = {**of_keeper, "wrap": "faulty", "unless": self._errors, "match": "step-*"}
        return store_env(
            {**faulty, "errno": "EIO", "operation": ["write", "create", "close", "open_sink"], "chance": 0.02},
            {**faulty, "errno": "ENOSPC", "operation": ["write", "create"], "chance": 0.02},
            {**faulty, "errno": "EIO", "operation": ["delete", "delete_folder", "list"], "chance": 0.02},
            {**faulty, "errno": "EIO", "operation": ["create", "close"], "chance": 0.01, "after": True},
            {**of_keeper, "wrap": "slow", "operation": "*", "delay_s": 0.2, "chance": 0.02},
            {**of_keeper, "wrap": "blocking", "operation": ["write", "create", "delete"], "match": "step-*",
             "release": self._hangs, "timeout_s": 600.0},
        )  # fmt: skip

    # -- the whole of it -------------------------------------------------------------------

    def run_for(self, seconds: float, say: Callable[[str], None] = lambda _: None) -> None:
        """Soak for so long, end it, and look at what is left."""
        ends = time.monotonic() + seconds
        try:
            while time.monotonic() < ends and not self.wrong:
                self._start()
                self._let_run(min(ends, time.monotonic() + self._calm()), say)
                if time.monotonic() < ends:
                    self._kill()
                    self._await_the_end()
            self._end(say)
        finally:
            for process in self._ranks:
                process.kill()
                process.join()
            for pid in keepers_of(self.folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)

    def _calm(self) -> float:
        """How long until the next kill."""
        long = self._random.random() < 0.15
        return self._random.uniform(0.1, 1.0) * self._calm_s * (4.0 if long else 1.0)

    def _start(self) -> None:
        number = next(self._starts)
        self.counts["starts"] += 1
        self._ranks = [self._start_rank(number, rank) for rank in range(WORLD)]

    def _start_rank(self, number: int, rank: int) -> Any:
        training = Training(
            run=self.run,
            journal=str(self.folder / f"journal-{number:04}"),
            rendezvous=str(self.folder / f"rendezvous-{number:04}"),
            stderr=str(self.folder / f"stderr-{number:04}"),
            environment=self._environment,
            every_s=self._every_s,
            on_error="raise" if number % 3 == 0 else "warn",
        )
        process = start(training, rank)
        self.processes[process.pid] = Process(f"rank {rank}", process.pid)
        return process

    def _let_run(self, until: float, say: Callable[[str], None]) -> None:
        """Watch until then, or until a rank has ended by itself; now and then the storage fails for a while."""
        turns_at, hangs_until = time.monotonic(), None
        self._progress_at = time.monotonic()
        while time.monotonic() < until and not self.wrong:
            now = time.monotonic()
            if now > turns_at:
                turns_at = now + self._random.uniform(1.0, 6.0)
                _set(self._errors, self._random.random() < 0.5)
                if self._random.random() < 0.15:
                    hangs_until = now + self._random.uniform(0.5, 2.5 * PROGRESS_TIMEOUT_S)
                    self.counts["hangs of the storage"] += 1
                    _set(self._hangs, False)
            if hangs_until is not None and now > hangs_until:
                hangs_until = None
                _set(self._hangs, True)
            self._look()
            say(self._line())
            if any(process.exitcode is not None for process in self._ranks):
                self.counts["ended by an error"] += 1
                self._await_the_end()
                break
            time.sleep(0.2)
        _set(self._hangs, True)

    def _kill(self) -> None:
        if all(process.exitcode is not None for process in self._ranks):
            return
        kind = self._random.choices(list(KILLS), list(KILLS.values()))[0]
        if self._random.random() < 0.3:
            _set(self._hangs, False)  # in the middle of a write
            time.sleep(self._random.uniform(0.0, self._every_s))
        self.kills[kind] += 1
        pids = {"rank 0": [self._ranks[0].pid], "rank 1": [self._ranks[1].pid]}.get(kind, [])
        if "ranks" in kind:
            pids = [process.pid for process in self._ranks]
        if "keeper" in kind:
            pids = pids + keepers_of(self.folder)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        _set(self._hangs, True)
        if kind == "keeper":  # whether training goes on is up to its policy
            deadline = time.monotonic() + self._random.uniform(0.5, 4.0) * self._every_s
            while time.monotonic() < deadline:
                self._look()
                time.sleep(0.1)
            for process in self._ranks:
                process.terminate()

    def _await_the_end(self) -> None:
        """As a launcher does: when one rank has ended, the others have to."""
        deadline = time.monotonic() + END_S
        while any(process.exitcode is None for process in self._ranks):
            self._look()
            if time.monotonic() > deadline:
                left = [process.name for process in self._ranks if process.exitcode is None]
                self.wrong.append(f"{left} still there {END_S:g} s after the job had to end; {self._last_words()}")
                return
            time.sleep(0.1)
        self._look()

    def _end(self, say: Callable[[str], None]) -> None:
        """No more faults: the job stops by SIGTERM, saves, and leaves nothing."""
        say("ending")
        _set(self._errors, True)
        _set(self._hangs, True)
        if self.wrong:
            return
        for process in self._ranks:  # it may be ending by what failed just before
            process.terminate()
        self._await_the_end()
        self._start()
        before = self.latest
        self._wait(lambda: self._look() or self.latest > before, "a step is committed once nothing fails any more")
        for process in self._ranks:
            process.terminate()
        self._await_the_end()
        codes = [process.exitcode for process in self._ranks]
        if codes != [ckpt.Preempted.exit_code] * WORLD:
            self.wrong.append(f"the ranks ended with {codes}, expected 75; {self._last_words()}")
        self._wait(lambda: not self._processes_left(), f"no process is left but {self._processes_left()}")
        self._check_what_is_left()

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + END_S
        while not condition():
            if time.monotonic() > deadline:
                self.wrong.append(f"not within {END_S:g} s: {what}; {self._last_words()}")
                return
            time.sleep(0.1)

    # -- what must hold --------------------------------------------------------------------

    def _look(self) -> None:
        self._read_journals()
        self._check_steps()
        for pid in keepers_of(self.folder):
            self.processes.setdefault(pid, Process("keeper", pid))
        for process in self.processes.values():
            process.look()
        for process in self.processes.values():
            if process.growth_nbytes > GROWTH_NBYTES:
                self.wrong.append(
                    f"{process.what}: its memory grew by {process.growth_nbytes:,} bytes since it was warm"
                )
            if process.max_fds > MAX_FDS or process.max_threads > MAX_THREADS:
                self.wrong.append(f"{process.what}: {process.max_fds} descriptors, {process.max_threads} threads")
        folders = len(list(Path(self.run).glob("step-*")))
        self.max_folders = max(self.max_folders, folders)
        if folders > self._most_folders():
            self.wrong.append(f"{folders} attempts in the run, at most {self._most_folders()} expected")

    def _most_folders(self) -> int:
        """What is kept, what is being written or deleted, and what each death or hang may leave: two saves' debris."""
        deaths = sum(self.kills.values()) + self.counts["ended by an error"] + self.counts["hangs of the storage"]
        return KEEP_LAST + 6 + 2 * deaths

    def _read_journals(self) -> None:
        for path in sorted(self.folder.glob("journal-*")):
            with open(path, "rb") as file:
                file.seek(self._read[path.name])
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._read[path.name] += len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line), first=path.name.endswith("-0"))

    def _take(self, entry: dict[str, Any], *, first: bool) -> None:
        match entry["what"]:
            case "committed":
                self.told.setdefault(entry["step"], entry["attempt"])
                self.counts["committed"] += first
                self._progress_at = time.monotonic()
            case "failed":
                self.counts["failed"] += first
            case "saving":
                self.counts["saves"] += first
            case "restored":
                self.counts["restores"] += first
                if not entry["uniform"]:
                    self.wrong.append(f"step {entry['step']} was restored, and is not of one step")
                newest = max(self.told, default=-1)
                if (entry["step"] if entry["step"] is not None else -1) < newest:
                    self.wrong.append(f"step {entry['step']} was restored, although {newest} was told to be committed")

    def _check_steps(self) -> None:
        told = dict(self.told)
        # The run changes while it is looked at: only what is still so when it is looked at again is wrong.
        for last_try in (False, False, True):
            problems = self._problems(told)
            if not problems:
                return
            if last_try:
                self.wrong += problems
            time.sleep(0.2)

    def _problems(self, told: dict[int, str]) -> list[str]:
        try:
            live = {state.attempt.step: state for state in Run.open(self.run).survey().live}
        except ckpt.NotFoundError:
            return [f"there is no run, although {len(told)} steps were told to be committed"] if told else []
        found = []
        newest = max(live, default=-1)
        if newest < self.latest:
            found.append(f"the latest step went back from {self.latest} to {newest}")
        self.latest = max(self.latest, newest)
        for step, attempt in told.items():
            if step not in live and sum(other > step for other in live) < KEEP_LAST:
                found.append(f"step {step} ({attempt}) was told to be committed and is lost; live: {sorted(live)}")
        if newest >= 0:
            found += self._problems_of(newest)
        return found

    def _problems_of(self, step: int) -> list[str]:
        """The step verifies and is one step throughout."""
        try:
            report = ckpt.verify(self.run, step=step)
            content = ckpt.read(self.run, step=step)
        except ckpt.CkptError as error:
            return [f"step {step} cannot be read: {error}"]
        self.counts["steps read back"] += 1
        found = {*extremes(content["shard"]), *extremes(content["replica"]), float(content["count"])}
        problems = [f"step {step}: {problem}" for problem in report.problems]
        if found != {float(step)} or content["mine"] != [[0, step], [1, step]]:
            problems.append(f"step {step} holds {sorted(found)} and {content['mine']}")
        return problems

    def _check_what_is_left(self) -> None:
        self._look()
        report = prune(self.run, grace_s=0.0)
        self.counts["debris removed at the end"] = len(report.removed)
        live = sorted(state.attempt.step for state in Run.open(self.run).survey().live)
        folders = len(list(Path(self.run).glob("step-*")))
        if live != [self.latest - 2, self.latest - 1, self.latest] and len(live) > KEEP_LAST + 1:
            self.wrong.append(f"the steps at the end are {live}, expected the last {KEEP_LAST}")
        if folders != len(live):
            self.wrong.append(f"{folders} attempts are left after pruning, of which {len(live)} are live")
        for step in live:
            self.wrong += self._problems_of(step)
        writers = len(list(Path(self.run, "writers").iterdir()))
        if writers > self.counts["starts"]:
            self.wrong.append(f"{writers} writer records after {self.counts['starts']} starts")

    def _processes_left(self) -> dict[int, str]:
        mark, found = f"{MARK}={self.folder}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0") and process_identity(int(folder.name)):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        return found

    # -- for people ------------------------------------------------------------------------

    def _line(self) -> str:
        kills = sum(self.kills.values())
        return (
            f"{self.counts['saves']} saves, {self.counts['committed']} committed, {self.counts['failed']} failed, "
            f"{kills} kills, {self.counts['starts']} starts, latest step {self.latest}"
        )

    def _last_words(self) -> str:
        texts = sorted(self.folder.glob("stderr-*"), key=lambda path: path.stat().st_mtime)[-WORLD:]
        return " | ".join(f"{path.name}: {path.read_text()[-600:]}" for path in texts)

    def table(self) -> list[tuple[str, str]]:
        """What there was, for a summary."""
        of = {what: [p for p in self.processes.values() if p.what.startswith(what)] for what in ("keeper", "rank")}
        rows = [(what, str(self.counts[what])) for what in (
            "saves", "committed", "failed", "starts", "ended by an error", "restores", "hangs of the storage",
            "steps read back", "debris removed at the end",
        )]  # fmt: skip
        rows += [(f"kills: {kind}", str(self.kills[kind])) for kind in KILLS]
        for what, seen in of.items():
            grown = max((p.growth_nbytes for p in seen), default=0)
            rows += [
                (f"{what}: processes", str(len(seen))),
                (f"{what}: max RSS", f"{max((p.max_nbytes for p in seen), default=0) / 1e6:.0f} MB"),
                (f"{what}: max growth beyond warm-up", f"{grown / 1e6:.1f} MB"),
                (f"{what}: max descriptors", str(max((p.max_fds for p in seen), default=0))),
                (f"{what}: max threads", str(max((p.max_threads for p in seen), default=0))),
            ]
        rows.append(("attempts in the run, at most", f"{self.max_folders}"))
        rows.append(("latest step", str(self.latest)))
        return rows


def _set(path: Path, there: bool) -> None:
    if there:
        path.touch()
    else:
        path.unlink(missing_ok=True)
