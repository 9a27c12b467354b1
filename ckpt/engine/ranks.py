"""The ranks that save and load together, and the few things they tell each other.

Every collective runs in the caller's thread, on a gloo group of ckpt's own, so that it can cross
neither a collective of the training nor its time-out. Without a process group there is one rank.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ckpt.errors import BadInputError, CkptError, RankError

AGREE_TIMEOUT_S = 1800.0

Result = TypeVar("Result")

_groups: list[tuple[Any, Ranks]] = []  # (default group, its ranks): the current one only
_numbers = itertools.count(1)


class Ranks:
    """This process among the ranks of the default process group."""

    def __init__(self, rank: int, world: int, group: Any = None, number: int = 0) -> None:
        self.rank = rank
        self.world = world
        self.number = number  # tells the process groups of this process apart; 0: none
        self._group = group

    @classmethod
    def current(cls) -> Ranks:
        """The ranks of the initialised process group, or a world of one.

        The first call on a process group is collective. Raises BadInputError when WORLD_SIZE says
        that there are others and no group is initialised: each would save the whole state.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise BadInputError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but no process group is initialised; "
                    "call torch.distributed.init_process_group() first, or unset WORLD_SIZE"
                )
            return cls(0, 1)
        default = dist.group.WORLD
        if not _groups or _groups[0][0] is not default:  # an older default group is gone for good
            own = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_TIMEOUT_S))
            _groups[:] = [(default, cls(dist.get_rank(), dist.get_world_size(), own, next(_numbers)))]
        return _groups[0][1]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, make: Callable[[], Result]) -> Result:
        """Rank 0's ``make()`` on every rank; an error of it is raised on every rank."""
        if self.world == 1:
            return make()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except CkptError as error:
                outcome[1] = error
            except Exception as error:  # noqa: BLE001 - the others wait for the broadcast, whatever went wrong
                outcome[1] = CkptError(f"rank 0: {type(error).__name__}: {error}")
        dist.broadcast_object_list(outcome, src=0, group=self._group)
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

    def agree(self, raised: Sequence[bool], numbers: Sequence[int]) -> tuple[list[bool], bool]:
        """(whether any rank raised each flag, whether all have the same numbers): one small all-reduce.

        All there is between ranks in a save of an unchanged structure. Numbers are of 63 bits.
        """
        if self.world == 1:
            return list(raised), True
        told = torch.tensor([*raised, *numbers, *(-number for number in numbers)], dtype=torch.int64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        first, second = len(raised), len(raised) + len(numbers)
        largest = told.tolist()
        same = all(most == -least for most, least in zip(largest[first:second], largest[second:], strict=True))
        return [bool(flag) for flag in largest[:first]], same

    def all_or_none(self, act: Callable[[], Result]) -> Result:
        """``exchange`` of nothing but success."""
        return self.exchange(lambda: (act(), None))[0]

    def start_flag(self, value: bool) -> FlagInFlight:
        """Start an asynchronous all-reduce (or) of one flag; read it a step later."""
        if self.world == 1:
            return FlagInFlight(None, torch.tensor([value], dtype=torch.int32))
        flag = torch.tensor([value], dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return FlagInFlight(work, flag)


class FlagInFlight:
    """A flag on its way; ``result()`` waits for it."""

    def __init__(self, work: Any, flag: torch.Tensor) -> None:
        self._work = work
        self._flag = flag

    def result(self) -> bool:
        """Whether any rank raised the flag."""
        if self._work is not None:
            self._work.wait()
        return bool(self._flag.item())


def _of_rank(rank: int, kind: type[BaseException], message: str) -> CkptError:
    if issubclass(kind, RankError):
        return RankError(message)
    error = RankError(f"rank {rank}: {kind.__name__}: {message}")
    if issubclass(kind, CkptError):
        error.exit_code = kind.exit_code  # the job ends with the cause's exit code on every rank
    return error
