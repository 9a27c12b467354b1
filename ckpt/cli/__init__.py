"""The ``ckpt`` command: one module per verb, each with ``arguments(parser)`` and ``run(arguments) -> exit code``.

Only the module of the verb asked for is imported, so ``ckpt ls`` answers at once. Text for people
goes to stdout, progress and the one sentence of an error to stderr; with ``--json`` stdout is one
JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ckpt.errors import BadInputError, CkptError, printable

VERBS = {
    "ls": "list the steps of a run: which are live, which are not, and why",
    "show": "show one step: who wrote it, its tensors, values and files",
    "verify": "read every byte of a step and compare it with what was saved",
    "repair": "put damaged or missing files of a step right, from parity or copies",
    "diff": "compare two steps, tensor by tensor and value by value",
    "restore": "merge the shards of a step into whole tensors, in plain files",
    "copy": "copy steps to another place, every byte compared on the way",
    "rollback": "make an older step the latest",
    "prune": "remove what no reader needs any more",
    "keeper": "say what this node's keeper processes are doing: `ckpt keeper status`",
}

EXIT_CODES = """\
exit codes:
    0  done; verify, repair: every byte is right; diff: nothing differs
    1  diff: something differs; or an error that is none of those below
    2  bad input: an argument, or a path that is no run
    3  no such run, no such step
    4  damaged: bytes that are not what COMMIT pinned
    5  a format version or a feature that this version does not know
    6  a newer writer holds the run
    7  a save that did not become a step
    8  the storage refused, failed or is full
    9  stored and wanted tensors differ
   10  the keeper process is gone
   11  another rank failed
   75  stopped by SIGTERM after a last save: start again
  130  stopped by Ctrl-C

Errors are one sentence on stderr; CKPT_TRACEBACK=1 shows where they came from.
RUN is the root folder of a run: a path or a URL.
"""

BAD_INPUT_CODE = BadInputError.exit_code
STORE_CODE = 8
INTERRUPTED_CODE = 130
BROKEN_PIPE_CODE = 141  # what a shell reports for a program that SIGPIPE ended


class _Parser(argparse.ArgumentParser):
    """Its complaint is one sentence too."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT_CODE, f"ckpt: {message}; see `{self.prog} --help`\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import ckpt

        sys.stdout.write(f"ckpt {ckpt.__version__}\n")
        parser.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and give its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left. What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_CODE
    except KeyboardInterrupt:
        sys.stderr.write("ckpt: stopped\n")
        return INTERRUPTED_CODE
    except Exception as error:
        if os.environ.get("CKPT_TRACEBACK", "0") not in {"", "0"}:
            raise
        return _tell(error)
    return code


def _run(words: Sequence[str]) -> int:
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = _Parser(
        prog="ckpt",
        description="Look at, check and use the steps of a training run. Needs no torchrun.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for name, line in VERBS.items():
        verb = verbs.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.", add_help=True)
        if name == chosen:
            module = importlib.import_module(f"ckpt.cli.{name}")
            module.arguments(verb)
            verb.formatter_class = argparse.RawDescriptionHelpFormatter
            verb.epilog = (module.__doc__ or "").partition("\n\n")[2].replace("``", "")
            verb.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parsed = parser.parse_args(words)
    code: int = importlib.import_module(f"ckpt.cli.{parsed.verb}").run(parsed)
    return code


def _tell(error: Exception) -> int:
    """One sentence on stderr, whatever it was; the exit code."""
    if isinstance(error, CkptError):
        message, code = str(error), error.exit_code
    elif isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        message, code = f"{place}{error.strerror or error}", STORE_CODE
    else:
        said = f"{type(error).__name__}: {error}"
        message, code = f"a fault of ckpt itself ({said}); CKPT_TRACEBACK=1 shows where, please report it", 1
    sys.stderr.write(f"ckpt: {printable(' '.join(message.split()))}\n")
    return code
