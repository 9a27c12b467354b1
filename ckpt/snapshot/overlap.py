"""Copying while training goes on: tensors that only an optimizer's step changes are copied behind the caller's back.

Forward and backward read them; the next step of any optimizer waits, in torch's global pre-hook, until they are
copied (on a device: until the copies are queued, and its stream then waits for them, the host does not). Version
counters do not see every change (fused and foreach steps, ``.data``, FSDP2), so samples of every
tensor are taken before the copying begins and compared with what was copied.
"""

from __future__ import annotations

import _thread
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckpt.errors import BadInputError
from ckpt.snapshot.copy import as_integers, copy_into

LATE_MIN_NBYTES = 64 << 10  # what is smaller is copied at once: cheaper than to look after it
SAMPLES = 3  # of a tensor, the first and the last bytes among them
SAMPLE_NBYTES = 128

_live: list[Overlap] = []
_hook: Any = None


class Late(NamedTuple):
    """A tensor to copy to a place in the arena, and its name for messages."""

    name: str
    tensor: torch.Tensor
    arena_offset: int


def may_be_late(tensor: torch.Tensor) -> bool:
    """Whether a tensor is worth copying late, and can be sampled."""
    return tensor.nbytes >= LATE_MIN_NBYTES and tensor.is_contiguous()


def refuse_untimely_steps(optimizers: Sequence[Optimizer]) -> None:
    """BadInputError for optimizers whose steps the pre-hook cannot hold up: captured in a graph, run in backward."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            if group.get("capturable"):
                raise BadInputError(
                    f"overlap=True with a {kind} that is capturable: a step replayed from a CUDA graph cannot wait for "
                    "the copy; save without overlap"
                )
            for parameter in group["params"]:
                if _steps_in_backward(parameter):
                    raise BadInputError(
                        f"overlap=True with a {kind} whose parameters have hooks that run in backward, where an "
                        "optimizer may step: parameters would change while they are copied; save without overlap"
                    )


def _steps_in_backward(parameter: torch.Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no public way to ask
    return bool(hooks) or hasattr(parameter, "_in_backward_optimizers")


class Overlap:
    """One snapshot's late tensors on their way. ``finish`` is called once, from another thread, when all is copied.

    It gets None, or what went wrong: a BadInputError naming the tensors that changed meanwhile.
    ``progress`` is told how many bytes of the arena are final, all earlier ones having been copied before. The
    tensors are held until then.
    """

    def __init__(
        self,
        arena: memoryview,
        late: Sequence[Late],
        progress: Callable[[int], None] | None,
        finish: Callable[[BaseException | None], None],
    ) -> None:
        self.waited_s = 0.0  # how long optimizers' steps, and whoever else asked, had to wait
        self._arena = arena
        self._late = list(late)
        self._progress = progress
        self._finish = finish
        self._released = threading.Event()  # host tensors are copied, copies from devices are queued
        self._copied = threading.Event()
        self._queued: list[tuple[torch.device, torch.cuda.Event]] = []
        self._samples = [sample(one.tensor) for one in self._late]
        devices = {one.tensor.device for one in self._late if one.tensor.device.type == "cuda"}
        self._after = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        _hold_up_steps(self)
        # Not threading.Thread, whose start() hands the GIL over and waits: save() is to return first. Nor of a lower
        # priority: it needs the GIL for moments, and would keep it for long while others have its core.
        _thread.start_new_thread(self._run, ())

    def wait(self) -> None:
        """Wait until everything is copied."""
        self._wait_for(self._copied)

    def wait_released(self) -> None:
        """Wait until the tensors may be changed by what this thread does, and queues on its streams, next."""
        self._wait_for(self._released)
        for device, event in self._queued:
            torch.cuda.current_stream(device).wait_event(event)

    def _wait_for(self, event: threading.Event) -> None:
        if not event.is_set():
            started = time.perf_counter()
            event.wait()
            self.waited_s += time.perf_counter() - started

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            copies = [(one.tensor, one.arena_offset) for one in self._late]
            copy_into(self._arena, copies, self._progress, after=self._after, queued=self._release)
            self._refuse_changes()
        except BaseException as caught:  # noqa: BLE001 - whatever it is, the save must not hang
            error = caught
        _live.remove(self)
        self._released.set()
        self._late, self._samples = [], []
        try:
            self._finish(error)
        finally:
            self._copied.set()

    def _release(self, queued: list[tuple[torch.device, torch.cuda.Event]]) -> None:
        self._queued = queued
        self._released.set()

    def _refuse_changes(self) -> None:
        changed = []
        for one, before in zip(self._late, self._samples, strict=True):
            known = before if isinstance(before, bytes) else bytes(before.cpu().tolist())
            copied = b"".join(
                bytes(self._arena[one.arena_offset + start : one.arena_offset + stop])
                for start, stop in _spans(one.tensor.nbytes)
            )
            if copied != known:
                changed.append(one.name)
        if changed:
            names = ", ".join(changed[:10]) + (f" and {len(changed) - 10} more" if len(changed) > 10 else "")
            raise BadInputError(
                f"{names}: changed while a save with overlap=True was still copying; change what an optimizer "
                "owns in its steps only, or save without overlap"
            )


def sample(tensor: torch.Tensor) -> bytes | torch.Tensor:
    """Some bytes of a contiguous tensor; of one on a device as a tensor there, behind the work that is queued now."""
    spans = _spans(tensor.nbytes)
    if tensor.device.type == "cpu":
        address = tensor.data_ptr()
        return b"".join([ctypes.string_at(address + start, stop - start) for start, stop in spans])
    flat = as_integers(tensor).reshape(-1).view(torch.uint8)
    return torch.cat([flat[start:stop] for start, stop in spans])


def _spans(nbytes: int) -> list[tuple[int, int]]:
    if nbytes <= SAMPLES * SAMPLE_NBYTES:
        return [(0, nbytes)]
    last = nbytes - SAMPLE_NBYTES
    return [(last * i // (SAMPLES - 1), last * i // (SAMPLES - 1) + SAMPLE_NBYTES) for i in range(SAMPLES)]


def _hold_up_steps(overlap: Overlap) -> None:
    global _hook  # noqa: PLW0603 - torch has one list of global hooks, and this is ours in it
    _live.append(overlap)
    if _hook is None:  # kept for good: taking it away while a step walks the list of hooks would break that step
        _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: Any) -> None:
    for overlap in _live:
        overlap.wait_released()
