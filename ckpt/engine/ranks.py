"""The ranks that save and load together, and the few things they tell each other.

Every collective runs in the caller's thread, on a gloo group of ckpt's own (``ckpt.engine.group``), so that it can
cross neither a collective of the training nor its time-out. Without a process group there is one rank.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ckpt.engine.group import Group
from ckpt.errors import BadInputError, CkptError, RankError

NO_NUMBER = -(2**63)  # below every number and its negative

Result = TypeVar("Result")

_current: list[tuple[Any, Ranks]] = []  # (default group, its ranks): the current one only
_numbers = itertools.count(1)


class Ranks:
    """This process among the ranks of the default process group."""

    def __init__(self, rank: int, world: int, group: Group | None = None, number: int = 0) -> None:
        self.rank = rank
        self.world = world
        self.number = number  # tells the process groups of this process apart; 0: none
        self.renewals = 0  # how often ckpt's own group was made anew
        self._group = group
        self._thread = 0  # the one that began the verb under way

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of the initialised process group, or a world of one.

        The first call on a process group is collective. Raises BadInputError when WORLD_SIZE says
        that there are others and no group is initialised: each would save the whole state. RankError when not
        all ranks come.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise BadInputError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but no process group is initialised; "
                    "call torch.distributed.init_process_group() first, or unset WORLD_SIZE"
                )
            return cls(0, 1)
        default = dist.group.WORLD
        if not _current or _current[0][0] is not default:  # an older default group is gone for good
            rank, world, number = dist.get_rank(), dist.get_world_size(), next(_numbers)
            group = Group(_store(), rank, world, number) if world > 1 else None
            _current[:] = [(default, cls(rank, world, group, number))]
        return _current[0][1]

    def begin(self, doing: str) -> None:
        """A verb begins, ``the save of step 7``. Collective if one before it has failed between the ranks.

        The group of ckpt's own is then made anew. Raises RankError when not all ranks come.
        """
        if self._group is None:
            return
        if self._group.failed is not None:
            self._group = Group(_store(), self.rank, self.world, next(_numbers), self._group.peers, doing)
            self.renewals += 1
        self._group.doing = doing
        self._thread = threading.get_ident()

    def sign(self) -> None:
        """Tell the ranks that may wait for this one that its work goes on. Cheap: most calls do nothing.

        Only the thread that is in the verb can say so: one beside it may go on though that hangs.
        """
        if self._group is not None and threading.get_ident() == self._thread:
            self._group.sign()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self._group is None:
            return [value]
        return [_loads(raw) for raw in self._group.all_gather_bytes(pickle.dumps(value))]

    def from_first(self, make: Callable[[], Result]) -> Result:
        """Rank 0's ``make()`` on every rank; an error of it is raised on every rank."""
        if self._group is None:
            return make()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except CkptError as error:
                outcome[1] = error
            except Exception as error:  # noqa: BLE001 - the others wait for the broadcast, whatever went wrong
                outcome[1] = CkptError(f"rank 0: {type(error).__name__}: {error}")
        outcome = _loads(self._group.broadcast_bytes(pickle.dumps(outcome) if self.rank == 0 else None))
        if outcome[1] is not None:
            raise outcome[1]
        result: Result = outcome[0]
        return result

    def exchange(self, act: Callable[[], tuple[Result, Any]]) -> tuple[Result, list[Any]]:
        """Run ``act`` on every rank: this rank's own result, and in rank order what each wants the others to know.

        If one raises, all raise: a rank its own error, else a RankError that names the first that failed.
        """
        outcome: tuple[Result, Any] | None = None
        failure: Exception | None = None
        try:
            outcome = act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must learn of it
            failure = error
        told = None if outcome is None else outcome[1]
        answers = self.gather((told, None if failure is None else (type(failure), str(failure))))
        if failure is not None:
            raise failure
        for rank, (_, failed) in enumerate(answers):
            if failed is not None:
                raise _of_rank(rank, *failed)
        assert outcome is not None
        return outcome[0], [value for value, _ in answers]

    def agree(
        self, raised: Sequence[bool], numbers: Sequence[int], slots: Sequence[int | None] = ()
    ) -> tuple[list[bool], bool, list[bool]]:
        """(whether any rank raised each flag, whether all have the same numbers, which slots differ).

        One small all-reduce: all there is between ranks in a save of an unchanged structure. Numbers are of 63 bits.
        A slot differs when those ranks that have a number for it (None: this one has none) do not all have the same.
        """
        if self._group is None:
            return list(raised), True, [False] * len(slots)
        most = [NO_NUMBER if number is None else number for number in slots]
        least = [NO_NUMBER if number is None else -number for number in slots]
        told = [*map(int, raised), *numbers, *(-number for number in numbers), *most, *least]
        largest = iter(self._group.all_reduce_max(told))
        flags, most, least, slot_most, slot_least = (
            list(itertools.islice(largest, count)) for count in (len(raised), *[len(numbers)] * 2, *[len(slots)] * 2)
        )
        same = all(high == -low for high, low in zip(most, least, strict=True))
        differing = [high not in {-low, NO_NUMBER} for high, low in zip(slot_most, slot_least, strict=True)]
        return [bool(flag) for flag in flags], same, differing

    def all_or_none(self, act: Callable[[], Result]) -> Result:
        """``exchange`` of nothing but success."""
        return self.exchange(lambda: (act(), None))[0]

    def start_flag(self, value: bool) -> FlagInFlight:
        """Start an asynchronous all-reduce (or) of one flag; read it a step later."""
        if self._group is None:
            return FlagInFlight(None, lambda: [int(value)])
        self.begin("a training step")
        return FlagInFlight(self._group, self._group.start_all_reduce_max([int(value)]))


class FlagInFlight:
    """A flag on its way; ``result()`` waits for it."""

    def __init__(self, group: Group | None, wait: Callable[[], Sequence[int]]) -> None:
        self._group = group
        self._wait = wait

    def result(self) -> bool:
        """Whether any rank raised the flag; False when it was lost with its group, as has been said. RankError."""
        if self._group is not None and self._group.failed is not None:
            return False
        return any(self._wait())


def _loads(raw: bytes) -> Any:
    return pickle.loads(raw)  # noqa: S301 - from a rank of this job, as torch's own all_gather_object has it


def _store() -> Store:
    """The job's store, which the default process group was made with."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way to it


def _of_rank(rank: int, kind: type[BaseException], message: str) -> CkptError:
    if issubclass(kind, RankError):
        return RankError(message)
    error = RankError(f"rank {rank}: {kind.__name__}: {message}")
    if issubclass(kind, CkptError):
        error.exit_code = kind.exit_code  # the job ends with the cause's exit code on every rank
    return error
