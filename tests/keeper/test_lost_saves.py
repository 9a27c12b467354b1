"""``KeeperClient.alive`` turns False only when the saves that died with the keeper have failed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckpt.errors import KeeperError
from ckpt.keeper.client import KeeperClient, PendingTask
from tests.keeper.conftest import wait_for
from tests.keeper.rank_process import fill


def test_a_keeper_is_gone_only_when_its_saves_have_failed(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    """Else the next save starts another keeper and goes on, without a word about the save that was lost."""
    client = KeeperClient.connect(0)
    pending = client.begin(fill(client, url, 1, 1)[1])
    alive_meanwhile = []
    update = PendingTask._update

    def watched(self: PendingTask, *arguments: object, **keywords: object) -> None:
        alive_meanwhile.append(client.alive)
        update(self, *arguments, **keywords)

    monkeypatch.setattr(PendingTask, "_update", watched)
    os.kill(client.keeper_pid, signal.SIGKILL)
    wait_for(lambda: pending.done, "it has failed")
    client.close()
    assert alive_meanwhile == [True]


def test_a_save_that_could_not_begin_is_not_lost(folder: Path, url: str):
    """Its caller was told, and begins it with another keeper: that one must not hear that it was given up."""
    client = KeeperClient.connect(0)
    task = fill(client, url, 1, 1)[1]
    os.kill(client.keeper_pid, signal.SIGKILL)
    wait_for(lambda: not client.alive, "its end is noticed")
    client._lost = None  # as if it were not: what is sent now meets a closed socket
    with pytest.raises(KeeperError, match="is gone"):
        client.begin(task)
    assert client.lost == []
    client.close()
