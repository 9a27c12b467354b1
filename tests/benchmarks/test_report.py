"""Figures, bounds, and the exit code of --check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.running import figures_of


@pytest.mark.parametrize(
    ("value", "ratio", "bound", "holds"),
    [
        (9.0, 0.5, 0.5, True),
        (0.1, 0.6, 0.5, False),
        (0.1, 0.6, None, None),
        (9.0, None, 9.0, True),  # without a ratio the value itself is bounded
        (9.1, None, 9.0, False),
        (9.1, None, None, None),
    ],
)
def test_holds(value: float, ratio: float | None, bound: float | None, holds: bool | None):
    """A bound is of the ratio, else of the value."""
    from report import Figure

    assert Figure("a", value, "s", None if ratio is None else "b", ratio, bound).holds is holds


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str], check: bool, ratio: float):
    """It fails only if it is asked to and a bound is broken, and says which."""
    from report import Figure, finish, options

    arguments = [f"--json={tmp_path / 'out.json'}", f"--plot={tmp_path / 'out.png'}"]
    args = options("Asks something.").parse_args([*arguments, "--check"] if check else arguments)
    drawn: list[tuple[Path, str]] = []
    figures = [Figure("ours", 1.0, "s", "theirs", ratio, 1.0), Figure("theirs", 2.0, "s")]
    assert finish(args, "title", "here", figures, lambda *call: drawn.append(call)) == int(check and ratio > 1)
    assert drawn == [(tmp_path / "out.png", "title\nhere")]
    assert ("broken bound: ours: 2.00 of theirs, the bound is 1.0" in capsys.readouterr().err) == (ratio > 1)
    assert [figure["holds"] for figure in figures_of(tmp_path / "out.json")] == [ratio <= 1, None]
