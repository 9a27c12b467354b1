"""torch.distributed.checkpoint (DCP) in the way its own documents show: a Stateful around model and optimizer.

Fair to it: the asynchronous saves have a process group of their own (on the training's they hang as soon as training
uses it beside them) and a stager whose memory is kept; its files are fsynced, as ckpt's are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from peers import Peer, nothing
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from workload import Job


class Whole(Stateful):
    """A job's model and optimizer, as DCP's own example wraps them; the walk over both is on the path of every save."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        """Both state dicts, by names, as DTensors that share the job's memory."""
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put both back."""
        set_state_dict(
            self.job.model,
            self.job.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class Dcp:
    """DCP's saves of one job and loads into another; ``close`` ends what it keeps."""

    def __init__(self, job: Job, target: Job) -> None:
        self._job = job
        self._saved = {"train": Whole(job)}
        self._loaded = {"train": Whole(target)}
        self._groups: dict[AsyncCheckpointerType, Any] = {}
        self._stagers: dict[AsyncCheckpointerType, DefaultStager] = {}
        self.thread_cpu_s = 0.0  # of the threads that have written asynchronously, so far

    def peers(self) -> list[Peer]:
        """``save`` with its load, and ``async_save`` in a thread."""
        return [
            Peer("dcp", self.save, durable=True, loads={"dcp": self.load}),
            Peer("dcp async", self.save_in_thread, durable=True, asynchronous=True),
        ]

    def process_peer(self) -> Peer:
        """``async_save`` in a process."""
        return Peer("dcp process", self.save_in_process, durable=True, asynchronous=True)

    def walk_s(self) -> float:
        """Seconds of the walk alone."""
        started = time.perf_counter()
        self._saved["train"].state_dict()
        return time.perf_counter() - started

    def save(self, folder: Path) -> Callable[[], object]:
        """``dcp.save``."""
        state_dict_saver.save(self._saved, checkpoint_id=folder)
        return nothing

    def load(self, folder: Path) -> None:
        """``dcp.load``."""
        state_dict_loader.load(self._loaded, checkpoint_id=folder)

    def save_in_thread(self, folder: Path) -> Callable[[], object]:
        """``dcp.async_save`` as it is by default: a thread of this process writes."""
        future = self._async_save(folder, AsyncCheckpointerType.THREAD)
        caller = threading.get_ident()

        def note(_: Future[Any]) -> None:
            # Called by the thread that has done the save and that has done nothing else.
            if threading.get_ident() != caller:
                self.thread_cpu_s += time.thread_time()

        future.add_done_callback(note)
        return future.result

    def save_in_process(self, folder: Path) -> Callable[[], object]:
        """``dcp.async_save`` with a process that writes; it is started by the first one."""
        return self._async_save(folder, AsyncCheckpointerType.PROCESS).result

    def close(self) -> None:
        """Give the staging memory back."""
        for stager in self._stagers.values():
            stager.close()

    def _async_save(self, folder: Path, kind: AsyncCheckpointerType) -> Future[Any]:
        if kind not in self._stagers:
            self._groups[kind] = dist.new_group(backend="gloo")
            self._stagers[kind] = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=kind is AsyncCheckpointerType.PROCESS,
                    use_async_staging=False,  # it and the next want an accelerator
                    use_non_blocking_copy=False,
                )
            )
        future = state_dict_saver.async_save(
            self._saved,
            checkpoint_id=folder,
            process_group=self._groups[kind],
            async_checkpointer_type=kind,
            async_stager=self._stagers[kind],
        )
        assert isinstance(future, Future)  # the other kind of answer is for stagers in the background
        return future
