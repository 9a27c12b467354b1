"""A run: what a store holds under one training job's root. Reads it, opens it for writing, commits, deletes.

Keeper, engine and command line all go through here, so the rules of fencing and of write and
delete order stand in one place.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from ckpt import holds
from ckpt.errors import (
    AlreadyExistsError,
    BadInputError,
    CkptError,
    DamagedError,
    FencedError,
    NotFoundError,
    SaveFailedError,
    StoreError,
    UnsupportedFormatError,
)
from ckpt.format import records
from ckpt.format.commit import COMMIT, Attempt, Commit, decode_commit, encode_commit, parse_folder
from ckpt.format.hold import Hold
from ckpt.format.layout import Layout, decode_layout, layout_key
from ckpt.format.metrics import METRICS, METRICS_LIMIT_NBYTES, decode_metrics
from ckpt.format.part import Part, decode_part
from ckpt.format.writer import WRITERS, Writer, decode_writer, encode_writer, parse_writer_name, writer_key
from ckpt.plan import live
from ckpt.store import open_store
from ckpt.store.base import Store
from ckpt.store.oserrors import is_unreadable

COMMIT_LIMIT_NBYTES = 64 << 20
LAYOUT_LIMIT_NBYTES = 1 << 30
WRITER_LIMIT_NBYTES = 1 << 20

LIST_PAUSES_S = (0.1, 0.3, 0.6)  # before an empty listing is believed, where listings lag behind the keys
LISTED_TIMEOUT_S = 30.0  # how long a commit waits until a listing shows it


class StepState(msgspec.Struct, frozen=True):
    """One attempt as a reader sees it: live, superseded, abandoned, incomplete, damaged or unsupported, and why."""

    attempt: Attempt
    commit: Commit | None
    state: str
    why: str


class Survey(msgspec.Struct, frozen=True):
    """All writers (ascending) and all attempts (by step, writer, save) of a run."""

    writers: list[Writer]
    steps: list[StepState]

    @property
    def live(self) -> list[StepState]:
        """The live steps, ascending."""
        return [step for step in self.steps if step.state == live.LIVE]

    @property
    def states(self) -> dict[Attempt, tuple[str, str]]:
        """Attempt -> (state, why), as ``ckpt.plan.retention.to_delete`` takes it."""
        return {step.attempt: (step.state, step.why) for step in self.steps}


class Run:
    """One run in a store. Cheap to make; nothing is read until asked for. Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url
        self._layouts: dict[str, Layout] = {}
        self._newest_writer = 0  # that this object knows of
        self._durable: set[Attempt] = set()  # steps whose COMMIT was synced by this object

    @classmethod
    def open(cls, url: str | os.PathLike[str]) -> Run:
        """The run at a path or URL, which need not exist yet. BadInputError for a URL that no store takes."""
        return cls(open_store(url))

    def key(self, attempt: Attempt, name: str) -> str:
        """The key of a file of an attempt."""
        return f"{attempt.folder}/{name}"

    # -- reading ---------------------------------------------------------------------------

    def require(self) -> None:
        """Raises NotFoundError when nothing is there, BadInputError when what is there is no run."""
        if self._writer_numbers():
            return
        names = self.store.list()
        # A job that was killed while it made its first writer's record leaves that folder empty, and may start again.
        if not names or (names == [WRITERS] and not self.store.list(WRITERS)):
            raise NotFoundError(
                f"{self.url}: no run here, the folder does not exist or is empty; "
                "check the path (a run holds writers/, layouts/ and step-* folders)"
            )
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise BadInputError(
            f"{self.url}: not a ckpt run: it has no writers/ records, only {shown}; give the run's root folder"
        )

    def _writer_numbers(self) -> list[int]:
        """Ascending. Where listings lag, what they leave out is asked of the keys: numbers have no gaps."""
        parsed = (parse_writer_name(name) for name in self.store.list(WRITERS))
        numbers = {number for number in parsed if number is not None}
        if not self.store.lists_at_once:
            newest = max(self._newest_writer, *numbers, 0)
            while self.store.exists(writer_key(newest + 1)):
                newest += 1
            hidden = [number for number in range(1, newest + 1) if number not in numbers]
            numbers.update(number for number in hidden if self.store.exists(writer_key(number)))
            self._newest_writer = newest
        return sorted(numbers)

    def writer(self, number: int) -> Writer:
        """Writer ``number``'s record."""
        key = writer_key(number)
        writer = decode_writer(self._get(key, WRITER_LIMIT_NBYTES), f"{self.url}/{key}")
        if writer.number != number:
            raise DamagedError(f"{self.url}/{key}: says it is writer {writer.number}, its name says {number}")
        return writer

    def writers(self) -> list[Writer]:
        """Every writer, ascending. An unreadable record is an error: skipping one could bring back abandoned steps."""
        return [self.writer(number) for number in self._writer_numbers()]

    def attempts(self) -> list[Attempt]:
        """Every attempt's folder, committed or not, ascending.

        Where listings lag behind the keys, one without attempts of a run that has writers is read again.
        """
        found = self._listed_attempts()
        if not found and not self.store.lists_at_once and self._writer_numbers():
            for pause_s in LIST_PAUSES_S:
                time.sleep(pause_s)
                found = self._listed_attempts()
                if found:
                    break
        return found

    def _listed_attempts(self) -> list[Attempt]:
        return sorted(attempt for name in self.store.list() if (attempt := parse_folder(name)) is not None)

    def read_commit(self, attempt: Attempt) -> Commit:
        """The COMMIT of an attempt. NotFoundError without one; DamagedError, UnsupportedFormatError."""
        key = self.key(attempt, COMMIT)
        where = f"{self.url}/{key}"
        commit = decode_commit(self._get(key, COMMIT_LIMIT_NBYTES), where)
        if (commit.step, commit.attempt) != (attempt.step, attempt.label):
            raise DamagedError(
                f"{where}: is of step {commit.step} {commit.attempt}, its folder says {attempt.step} {attempt.label}"
            )
        return commit

    def survey(self) -> Survey:
        """Every writer and attempt with its state; reads each COMMIT, no payload."""
        writers, commits, others = self.writers(), {}, {}
        for attempt in self.attempts():
            try:
                commits[attempt] = self.read_commit(attempt)
            except NotFoundError:
                others[attempt] = ("incomplete", "no COMMIT: the save did not end, or is still under way")
            except UnsupportedFormatError as error:
                others[attempt] = ("unsupported", str(error))
            except DamagedError as error:
                others[attempt] = ("damaged", str(error))
        states = {**live.classify(writers, commits), **others}
        return Survey(writers, [StepState(a, commits.get(a), *states[a]) for a in sorted(states)])

    def live_steps(self) -> Iterator[StepState]:
        """Live steps, newest first, each COMMIT read only when it is reached.

        What is passed over (no COMMIT, damaged, unknown) comes too, with its state, so that the
        caller can say why.
        """
        writers = self.writers()
        found: set[int] = set()
        for attempt in live.candidates(writers, self.attempts()):
            if attempt.step in found:
                continue
            try:
                commit = self.read_commit(attempt)
            except NotFoundError:
                yield StepState(attempt, None, "incomplete", "no COMMIT")
            except UnsupportedFormatError as error:
                yield StepState(attempt, None, "unsupported", str(error))
            except DamagedError as error:
                yield StepState(attempt, None, "damaged", str(error))
            else:
                found.add(attempt.step)
                yield StepState(attempt, commit, live.LIVE, "")

    def find(self, step: int | None = None) -> StepState:
        """The live step of that number, or the newest. NotFoundError says which there are; damage is raised."""
        self.require()
        seen: list[int] = []
        passed: list[StepState] = []
        for state in self.live_steps():
            if step is not None and state.attempt.step != step:
                if state.commit is not None:
                    seen.append(state.attempt.step)
                continue
            if state.commit is not None:
                return state
            if state.state == "unsupported":
                raise UnsupportedFormatError(state.why)
            passed.append(state)
        damaged = [state for state in passed if state.state == "damaged"]
        if step is not None and damaged:
            raise DamagedError(damaged[0].why)
        reasons = "".join(f"; {p.attempt.folder} is {p.state} ({p.why})" for p in passed[:3])
        if step is None:
            raise NotFoundError(f"{self.url}: no committed step yet{reasons}")
        steps = ", ".join(str(s) for s in sorted(seen)) or "none"
        raise NotFoundError(f"{self.url}: no live step {step}; live steps: {steps}{reasons}")

    @contextlib.contextmanager
    def hold(self, attempt: Attempt) -> Iterator[Commit]:
        """Hold an attempt while the block reads it, so that nobody deletes its files; its COMMIT, read behind the hold.

        NotFoundError when it was deleted just before. See ``ckpt.holds``.
        """
        with holds.holding(self.store, attempt):
            yield self.read_commit(attempt)

    @contextlib.contextmanager
    def reading(self, step: int | None = None) -> Iterator[StepState]:
        """``find`` the live step of that number, or the newest, and hold it while the block reads it."""
        with self.holding(lambda: self.find(step)) as found:
            yield found

    @contextlib.contextmanager
    def holding(self, find: Callable[[], StepState]) -> Iterator[StepState]:
        """Hold the step that ``find`` gives while the block reads it; ``find`` is asked again when it has just gone."""
        with contextlib.ExitStack() as stack:
            while True:
                found = find()
                try:
                    commit = stack.enter_context(self.hold(found.attempt))
                except NotFoundError:  # deleted between the two looks: there is a newer one, or none of that number
                    continue
                break
            yield msgspec.structs.replace(found, commit=commit)

    def held(self) -> dict[Attempt, Hold]:
        """The attempts that readers hold."""
        return holds.look(self.store)[0]

    def metrics(self, attempt: Attempt, commit: Commit) -> dict[str, float]:
        """The numbers saved with a step; {} without any. DamagedError when they are not what COMMIT pins."""
        for ref in commit.files:
            if ref.name == METRICS:
                where = f"{self.url}/{self.key(attempt, METRICS)}"
                if ref.nbytes > METRICS_LIMIT_NBYTES:
                    raise DamagedError(f"{where}: {ref.nbytes} bytes, at most {METRICS_LIMIT_NBYTES} expected")
                return decode_metrics(self.pinned_file(attempt, METRICS, ref.nbytes, ref.digest), attempt, where)
        return {}

    def layout(self, digest: str) -> Layout:
        """The layout of that digest, checked against it; kept in memory."""
        if digest not in self._layouts:
            raw = self._pinned(layout_key(digest), LAYOUT_LIMIT_NBYTES)
            self._layouts[digest] = decode_layout(raw, digest)
        return self._layouts[digest]

    def part(self, attempt: Attempt, commit: Commit, rank: int) -> Part:
        """Rank ``rank``'s part of a step, checked against COMMIT."""
        ref = commit.parts[rank]
        raw = self.pinned_file(attempt, ref.name, ref.nbytes, ref.digest)
        return part_of(commit, rank, raw, f"{self.url}/{self.key(attempt, ref.name)}")

    def pinned_file(self, attempt: Attempt, name: str, nbytes: int, digest: str) -> bytes:
        """A small file of a step, whole, checked against the size and digest that COMMIT pins."""
        raw = self._pinned(self.key(attempt, name), nbytes)
        check_pinned(raw, nbytes, digest, f"{self.url}/{self.key(attempt, name)}")
        return raw

    def _pinned(self, key: str, limit_nbytes: int) -> bytes:
        try:
            size = self.store.size(key)
            if size > limit_nbytes:
                raise DamagedError(f"{self.url}/{key}: {size} bytes, at most {limit_nbytes} expected")
            return self._get(key, limit_nbytes)
        except NotFoundError:
            raise DamagedError(f"{self.url}/{key}: missing, though a committed step needs it") from None
        except StoreError as error:
            raise as_damage(error) from error.__cause__

    def _get(self, key: str, limit_nbytes: int) -> bytes:
        try:
            return self.store.get(key, limit_nbytes=limit_nbytes)
        except StoreError as error:
            raise as_damage(error) from error.__cause__

    # -- writing ---------------------------------------------------------------------------

    def open_writer(self, *, job: str, world: int, resumed_from: int | None) -> Writer:
        """Create the next writer record. From then on every older writer is fenced."""
        if resumed_from is not None:
            self._make_step_durable(resumed_from)
        while True:
            numbers = self._writer_numbers()
            writer = Writer(
                format=records.FORMAT,
                number=(numbers[-1] if numbers else 0) + 1,
                nonce=secrets.token_hex(8),
                job=job,
                host=socket.gethostname(),
                pid=os.getpid(),
                world=world,
                resumed_from=resumed_from,
                created_unix_s=time.time(),
            )
            try:
                self.store.create(writer_key(writer.number), encode_writer(writer))
            except AlreadyExistsError:
                continue  # another writer took the number between the listing and the put
            self._newest_writer = writer.number
            return writer

    def _make_step_durable(self, step: int) -> None:
        for state in self.live_steps():
            if state.attempt.step < step:
                break
            if state.commit is not None and state.attempt.step == step:
                self.make_durable([state.attempt])
                break

    def make_durable(self, committed: Iterable[Attempt]) -> None:
        """See to it that steps outlast a power failure, before anything leans on them: a writer, or a deletion.

        A COMMIT that is seen may not be synced yet, when whoever has created it was killed at that moment.
        """
        for attempt in committed:
            if attempt not in self._durable:
                with contextlib.suppress(NotFoundError):  # deleted meanwhile
                    self.store.sync(self.key(attempt, COMMIT))
                    self._durable.add(attempt)

    def check_not_fenced(self, number: int) -> None:
        """Raises FencedError, naming who holds the run, when a newer writer than ``number`` exists."""
        newest = self._writer_numbers()[-1:]
        if newest and newest[0] > number:
            raise FencedError(f"{self.url}: writer {number} has stopped, {describe_writer(self.writer(newest[0]))}")

    def commit(
        self,
        attempt: Attempt,
        commit: Commit,
        layouts: Sequence[tuple[str, bytes]] = (),
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the attempt a step; ``layouts`` are (digest, bytes). All else it pins must be durable already.

        ``go_on`` is called when nothing but COMMIT is missing; what it raises goes through, and there is no step.

        Raises FencedError when a newer writer holds the run (before: nothing was written; after:
        the step exists but is not live), SaveFailedError when another COMMIT stands there. Where listings lag
        behind the keys it returns when they show the step, or after ``LISTED_TIMEOUT_S``.
        """
        for digest, layout in layouts:
            self.create_layout(digest, layout)
        self.check_not_fenced(attempt.writer)
        raw, key = encode_commit(commit), self.key(attempt, COMMIT)
        go_on()
        try:
            self.store.create(key, raw)
        except AlreadyExistsError:
            # A put whose answer was lost is retried by stores: what stands there may be ours.
            if self.store.get(key, limit_nbytes=COMMIT_LIMIT_NBYTES) != raw:
                raise SaveFailedError(f"{self.url}/{key}: exists with other content; this save is not a step") from None
        self._durable.add(attempt)
        limit = live.cutoffs(self.writers()).get(attempt.writer)
        if limit is not None and limit.hides(attempt.step):
            by = "" if limit.by is None else describe_writer(limit.by)
            raise FencedError(f"{self.url}: step {attempt.step} was committed but is not live, {by}")
        self.await_listed(attempt)

    def await_listed(self, attempt: Attempt) -> None:
        """Until whoever looks for the latest step finds this one: where listings lag, a commit waits for them."""
        deadline = time.monotonic() + LISTED_TIMEOUT_S
        while not self.store.lists_at_once and attempt.folder not in self.store.list():
            if time.monotonic() > deadline:
                return  # a step all the same; COMMIT says so
            time.sleep(LIST_PAUSES_S[0])

    def create_layout(self, digest: str, raw: bytes) -> None:
        """Have the layout of that digest there; what stands in its place and is damaged is made anew."""
        try:
            self.store.create(layout_key(digest), raw)
        except AlreadyExistsError:
            try:
                decode_layout(self.store.get(layout_key(digest), limit_nbytes=LAYOUT_LIMIT_NBYTES), digest)
            except DamagedError:
                # Its name says what its bytes must be: putting them right mends the older steps too.
                self.store.delete(layout_key(digest))
                self.store.create(layout_key(digest), raw)

    def delete_attempt(self, attempt: Attempt) -> Hold | None:
        """Remove an attempt, COMMIT first, so that no reader ever meets a step with files missing.

        Whoever calls has looked for holds. The answer is None, or the hold of a reader who came meanwhile: then only
        COMMIT is gone, he reads on, and the files are left for a later call.
        """
        self._durable.discard(attempt)
        self.store.delete(self.key(attempt, COMMIT))
        hold = self.held().get(attempt)
        if hold is None:
            self.store.delete_folder(attempt.folder)
        return hold

    def rollback(self, step: int) -> Writer:
        """One more writer record that goes on from ``step``: later steps of older writers are no longer live."""
        self.find(step)
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = str(os.getuid())
        return self.open_writer(job=f"rollback by {user}", world=0, resumed_from=step)


def part_of(commit: Commit, rank: int, raw: bytes, where: str) -> Part:
    """The part in ``raw``. DamagedError when it is not rank ``rank``'s of that step."""
    part = decode_part(raw, where)
    if (part.step, part.attempt, part.rank, part.world) != (commit.step, commit.attempt, rank, commit.world):
        raise DamagedError(f"{where}: is the part of another attempt or rank")
    return part


def check_pinned(raw: bytes, nbytes: int, digest: str, where: str) -> None:
    """DamagedError, with sizes and digests, when ``raw`` is not the file that COMMIT pins."""
    found = records.digest(raw)
    if len(raw) != nbytes or found != digest:
        raise DamagedError(f"{where}: {len(raw)} bytes with digest {found}, COMMIT says {nbytes} bytes with {digest}")


def as_damage(error: StoreError) -> CkptError:
    """DamagedError for one object that cannot be read (a bad sector, a link in its place); else the error itself."""
    return DamagedError(str(error)) if is_unreadable(error) else error


def describe_writer(writer: Writer) -> str:
    """``writer 8 holds the run: job …, host …, pid …, since …``."""
    since = datetime.fromtimestamp(writer.created_unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"writer {writer.number} holds the run: {writer.job}, host {writer.host}, pid {writer.pid}, since {since}"
