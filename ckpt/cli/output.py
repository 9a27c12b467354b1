"""What the verbs print with: JSON, tables, sizes, times, and a progress bar. rich is loaded when text is printed."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ckpt.errors import BadInputError, printable

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 10_000  # what is piped into grep must not be wrapped at 80 columns
CELL_LIMIT_CHARS = 2000  # of a table: a name may be as long as its file


def step_number(text: str) -> int:
    """Argparse type of a step."""
    if not text.isdecimal() or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text!r} is no step number, expected 0 or more")
    return int(text)


def emit_json(document: Any) -> None:
    """Print one JSON document."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def say(line: str = "", style: str | None = None) -> None:
    """Print one line of text; on a terminal it wraps at words and may be styled.

    Whatever a checkpoint's text holds, it reaches a terminal as printable characters only.
    """
    line = printable(line)
    if sys.stdout.isatty():
        console().print(line, style=style, markup=False, highlight=False)
    else:
        sys.stdout.write(f"{line}\n")


def console() -> Console:
    """Where text for people goes."""
    from rich.console import Console

    return Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=False
    )


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    styles: Sequence[str | None] = (),
) -> None:
    """Print a table; columns named in ``right`` are aligned right; ``styles`` has one for each row."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for i, row in enumerate(rows):
        grid.add_row(
            *(Text(printable(cell[:CELL_LIMIT_CHARS])) for cell in row), style=styles[i] if i < len(styles) else None
        )
    # rich pads every line to the table's width; a pipe gets lines without trailing blanks.
    out = console()
    with out.capture() as captured:
        out.print(grid)
    for line in captured.get().splitlines():
        sys.stdout.write(f"{line.rstrip()}\n")


def nbytes_text(nbytes: int) -> str:
    """``999 B``, ``1.51 GB``: decimal units, three digits."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            digits = 0 if unit == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    raise AssertionError


def when_text(unix_s: float) -> str:
    """``2026-12-01 02:43:32``, local time."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def seconds_text(seconds: float) -> str:
    """``12 s``, ``3 min``, ``5.2 h``: how long something has taken, for people."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"


def counted(number: int, thing: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar of bytes on stderr when that is a terminal; gives ``advance(done, total)`` or None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def one_of(**flags: bool) -> None:
    """BadInputError when more than one of these options was given."""
    given = [f"--{name.replace('_', '-')}" for name, is_set in flags.items() if is_set]
    if len(given) > 1:
        raise BadInputError(f"{' and '.join(given)} exclude each other; give one of them")
