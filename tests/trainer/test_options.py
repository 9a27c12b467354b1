"""The command line: what does not fit together is refused in one sentence with exit code 2."""

from __future__ import annotations

from itertools import pairwise

import pytest

from trainer.faults import Kill
from trainer.options import parse
from trainer.train import warmup_then_cosine


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("", "--run"),
        ("--run r --steps 0", "0 is less than 1"),
        ("--run r --width 100", "--width 100 is not a multiple of 12"),
        ("--run r --batch-size 10 --accumulate 4", "choose a multiple of 4"),
        ("--run r --kill-rank 1", "go together"),
        ("--run r --every 10 --kill-rank 1 --at-step 10", "is not after the first save"),
        ("--run r --every 2 --kill-rank 1 --at-step 5", "the ranks of this job are 0 to 0"),
        ("--run r --dropout 1", "1 is not in [0, 1)"),
        ("--run r --step 10", "unrecognized"),
    ],
)
def test_bad_options(argv: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says what is wrong and what would do."""
    with pytest.raises(SystemExit) as ended:
        parse(argv.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_batch_must_divide_among_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixteen sequences on three ranks are refused before anything starts."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        parse(["--run", "r", "--batch-size", "16"])
    assert "among 3 ranks" in capsys.readouterr().err


def test_a_fault_is_due_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only at its step, only on its rank, and never in a run that restored anything."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    kill = parse(["--run", "r", "--every", "5", "--kill-rank", "1", "--at-step", "7"]).kill
    assert kill == Kill(1, 7)
    assert kill.due(1, 7, None)
    assert not kill.due(0, 7, None)
    assert not kill.due(1, 6, None)
    assert not kill.due(1, 7, 5)


def test_the_learning_rate_rises_then_falls() -> None:
    """In a line up to the warm-up's end, then down to a tenth, and never below."""
    factors = [warmup_then_cosine(done, warmup=4, total=20) for done in range(25)]
    assert factors[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert all(a > b for a, b in pairwise(factors[4:21]))
    assert factors[20:] == [0.1] * 5
