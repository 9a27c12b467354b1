"""The logs: what a line looks like, and what counts when a step was logged twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckpt
from trainer.journal import Journal, read_events, read_losses
from trainer.parallel import Place


def place(rank: int) -> Place:
    return Place(rank, 2, torch.device("cpu"))


def log(path: Path, rank: int, first: int, losses: list[float]) -> None:
    with Journal(place(rank), loss_log=path, events=None) as journal:
        for step, loss in enumerate(losses, start=first):
            journal.step(step, 9, loss=loss, norm=1.0, rate=0.1, tokens=10)


def test_a_loss_is_logged_to_the_last_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON line per step with float.hex(), by rank 0 alone."""
    path = tmp_path / "logs" / "losses"
    log(path, 1, 1, [1.0])
    assert not path.exists()
    log(path, 0, 1, [0.1, 2.0])
    assert path.read_text() == (
        '{"step": 1, "loss": "0x1.999999999999ap-4"}\n{"step": 2, "loss": "0x1.0000000000000p+1"}\n'
    )
    assert "loss  0.1000" in capsys.readouterr().out


def test_a_step_done_again_counts_as_done_last(tmp_path: Path) -> None:
    """The log is appended to, and the reader takes the last line of each step, in the order of the steps."""
    path = tmp_path / "losses"
    log(path, 0, 1, [3.0, 2.0, 1.0])
    log(path, 0, 2, [5.0, 6.0, 7.0])
    assert {step: float.fromhex(loss) for step, loss in read_losses(path).items()} == {1: 3.0, 2: 5.0, 3: 6.0, 4: 7.0}
    assert list(read_losses(path)) == [1, 2, 3, 4]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    """Somebody may follow the log of a running job."""
    path = tmp_path / "losses"
    path.write_text(json.dumps({"step": 1, "loss": "0x0p+0"}) + '\n{"step": 2, "lo')
    assert read_losses(path) == {1: "0x0p+0"}


def test_events_of_all_ranks_meet_in_one_file(tmp_path: Path) -> None:
    """Rank 0 tells of everything, the others only of what concerns every rank."""
    path = tmp_path / "events"
    assert read_events(path) == []
    for rank in (0, 1):
        with Journal(place(rank), loss_log=None, events=path) as journal:
            journal.begin(None)
            journal.event("killed", any_rank=True, step=3)
    assert [(e["event"], e["rank"]) for e in read_events(path)] == [("begin", 0), ("killed", 0), ("killed", 1)]
    assert all(e["time_s"] > 1e9 for e in read_events(path))


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The sentence names the file and the reason."""
    (tmp_path / "file").touch()
    with pytest.raises(ckpt.BadInputError, match="losses: no log can be appended to here"):
        log(tmp_path / "file" / "losses", 0, 1, [1.0])
