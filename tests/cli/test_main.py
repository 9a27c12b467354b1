from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt.cli import BROKEN_PIPE_CODE, EXIT_CODES, VERBS, main
from ckpt.errors import CkptError
from ckpt.format.commit import COMMIT
from ckpt.run import Run
from tests.cli.conftest import ckpt

RUN_VERBS = [verb for verb in VERBS if verb != "keeper"]  # that is about processes, and has a test module of its own


def command(*words, **options):
    words = [sys.executable, "-m", "ckpt.cli", *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def every_verb(run, tmp_path):
    """One good call of each verb."""
    return {
        "ls": ["ls", run.url],
        "show": ["show", run.url],
        "verify": ["verify", run.url],
        "repair": ["repair", run.url],
        "diff": ["diff", run.url, 100, 100],
        "restore": ["restore", run.url, tmp_path / "out"],
        "copy": ["copy", run.url, tmp_path / "copy"],
        "rollback": ["rollback", run.url, "--to", 200],
        "prune": ["prune", run.url],
    }


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_json_is_one_document(run, tmp_path, capsys, verb):
    """Every verb takes --json and prints one JSON object and nothing else."""
    code, out, err = ckpt(capsys, *every_verb(run, tmp_path)[verb], "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["run"] == run.url


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_text_is_for_people(run, tmp_path, capsys, verb):
    """Without --json every verb prints lines of text without escape codes or trailing blanks."""
    code, out, err = ckpt(capsys, *every_verb(run, tmp_path)[verb])
    assert (code, err) == (0, "")
    assert out.endswith("\n")
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_no_verb_imports_torch(run, tmp_path, verb):
    """No verb needs torch: it is not even importable here."""
    code = "import sys; sys.modules['torch'] = None; from ckpt.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *map(str, every_verb(run, tmp_path)[verb])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_ls_answers_at_once(run):
    """`ckpt ls` on a run takes less than half a second, the interpreter included."""
    best = 9.0
    for _ in range(20):  # other work on the machine may delay some, not all
        started = time.perf_counter()
        assert command("ls", run.url).returncode == 0
        best = min(best, time.perf_counter() - started)
        if best < 0.5:
            break
    assert best < 0.5


def test_help_names_every_verb_and_exit_code(capsys):
    """--help lists the verbs and all exit codes of the error tree."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"    {verb} " in out for verb in VERBS)
    assert EXIT_CODES.strip() in out

    def codes(kind):
        return {kind.exit_code}.union(*map(codes, kind.__subclasses__()))

    listed = {int(line.split()[0]) for line in EXIT_CODES.splitlines() if line[:5].strip().isdecimal()}
    assert codes(CkptError) <= listed


def test_the_documentation_has_the_same_exit_codes():
    """docs/cli.md lists the exit codes of --help, in the same words, and each verb."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().replace("`", "")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    listed = re.findall(r"^ +(\d+)  (.*)$", EXIT_CODES, re.MULTILINE)
    assert rows == [*listed, (str(BROKEN_PIPE_CODE), "who read the output has left")]
    assert re.findall(r"^## (\w+):", text, re.MULTILINE) == list(VERBS)


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_help_of_a_verb(capsys, verb):
    """Each verb explains its arguments."""
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "RUN" in out
    assert "--json" in out


def test_version(capsys):
    """--version prints the version."""
    import ckpt as package

    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"ckpt {package.__version__}\n")


@pytest.mark.parametrize(
    "words",
    [[], ["nonsense"], ["ls"], ["show", "run", "--step", "x"], ["show", "run", "--step", "-1"], ["rollback", "run"]],
)
def test_a_wrong_command_line_is_one_sentence(capsys, words):
    """What argparse refuses is exit code 2 and one line that says where help is."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err.startswith("ckpt: ")
    assert err.count("\n") == 1
    assert "--help" in err


def one_sentence(err):
    return err.startswith("ckpt: ") and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_runs_that_are_none(run, tmp_path, capsys, verb):
    """No such folder, an empty one, one that is no run, a file: one sentence each, its exit code, nothing made."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for where, code, what in (
        ("absent", 3, "no run here"),
        ("empty", 3, "no run here"),
        ("other", 2, "not a ckpt run: it has no writers/ records, only notes.txt; give the run's root folder"),
        ("file", 2, "is a file"),
        (Path(run.url) / "step-00000100-w1.1", 2, "not a ckpt run"),
    ):
        words = every_verb(run, tmp_path)[verb]
        words[1] = tmp_path / where
        found, out, err = ckpt(capsys, *words)
        assert (found, out) == (code, ""), where
        assert one_sentence(err)
        assert what in err
        assert str(tmp_path / where) in err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_kind_of_url(capsys):
    """A URL that no store takes is bad input."""
    code, _, err = ckpt(capsys, "ls", "gopher://host/run")
    assert code == 2
    assert one_sentence(err)


@pytest.mark.parametrize("verb", ["show", "verify", "diff", "restore", "rollback"])
def test_a_step_that_is_not_there(run, tmp_path, capsys, verb):
    """The sentence lists the steps that there are; exit code 3, and nothing is made."""
    words = {
        "diff": ["diff", run.url, 100, 301],
        "rollback": ["rollback", run.url, "--to", 301],
    }.get(verb, [*every_verb(run, tmp_path)[verb], "--step", 301])
    code, out, err = ckpt(capsys, *words)
    assert (code, out) == (3, "")
    assert one_sentence(err)
    assert "no live step 301; live steps: 100, 200, 300" in err
    assert not (tmp_path / "out").exists()
    assert len(run.writers()) == 1


@pytest.mark.parametrize("verb", ["show", "restore", "rollback"])
def test_a_commit_that_is_cut(run, tmp_path, capsys, verb):
    """Asking for a step whose COMMIT is torn is exit code 4 and names the file."""
    path = next(Path(run.url).glob(f"step-00000300-*/{COMMIT}"))
    path.write_bytes(path.read_bytes()[:-7])
    step = "--to" if verb == "rollback" else "--step"
    words = {
        "show": ["show", run.url],
        "restore": ["restore", run.url, tmp_path / "out"],
        "rollback": ["rollback", run.url],
    }
    code, out, err = ckpt(capsys, *words[verb], step, 300)
    assert (code, out) == (4, "")
    assert one_sentence(err)
    assert str(path) in err


def rewrite(path, old, new):
    """Change COMMIT's text and make its digest right again."""
    from ckpt.format import records

    line = path.read_bytes().split(b"\n")[0].replace(old, new)
    path.write_bytes(line + b"\n" + records.digest(line).encode() + b"\n")


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b'"features":[]', b'"features":["sparse"]', "unknown feature sparse; it was written by ckpt 0.1.0"),
        (b'"ckpt/1"', b'"ckpt/2"', "format 'ckpt/2', this reader knows 'ckpt/1'"),
    ],
)
@pytest.mark.parametrize("verb", ["show", "verify", "restore"])
def test_a_commit_of_an_unknown_version(run, tmp_path, capsys, verb, old, new, what):
    """Asking for a step of an unknown version or feature is exit code 5 and says what wrote it; ls shows it."""
    rewrite(next(Path(run.url).glob(f"step-00000300-*/{COMMIT}")), old, new)
    code, out, err = ckpt(capsys, *every_verb(run, tmp_path)[verb], "--step", 300)
    assert (code, out) == (5, "")
    assert one_sentence(err)
    assert what in err
    code, out, err = ckpt(capsys, "ls", run.url)
    assert (code, err) == (0, "")
    assert "not live: step 300 (w1.3) is unsupported" in out


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "rollback", "prune"])
def test_an_unreadable_writer_record(run, tmp_path, capsys, verb):
    """Nobody can say which steps are live without every writer record: exit code 4, and it is named."""
    (Path(run.url) / "writers" / "000001.json").write_bytes(b"{")
    code, out, err = ckpt(capsys, *every_verb(run, tmp_path)[verb])
    assert (code, out) == (4, "")
    assert one_sentence(err)
    assert "writers/000001.json" in err


def test_a_traceback_only_when_asked(run, capsys, monkeypatch):
    """CKPT_TRACEBACK=1 shows where an error came from."""
    monkeypatch.setenv("CKPT_TRACEBACK", "1")
    with pytest.raises(CkptError):
        main(["show", run.url, "--step", "301"])


def test_a_fault_of_our_own_is_one_sentence_too(run, capsys, monkeypatch):
    """An exception that nobody thought of does not print a traceback either."""
    monkeypatch.setattr(Run, "survey", lambda _: 1 / 0)
    code, out, err = ckpt(capsys, "ls", run.url)
    assert (code, out) == (1, "")
    assert err == (
        "ckpt: a fault of ckpt itself (ZeroDivisionError: division by zero); "
        "CKPT_TRACEBACK=1 shows where, please report it\n"
    )


def test_ctrl_c(run, capsys, monkeypatch):
    """Ctrl-C ends with 130 and one word."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "survey", interrupted)
    assert ckpt(capsys, "ls", run.url) == (130, "", "ckpt: stopped\n")


def test_a_reader_that_leaves_is_no_error(run):
    """`ckpt show RUN | head -1` is quiet."""
    words = [sys.executable, "-m", "ckpt.cli", "show", run.url, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        assert (err, process.wait(30)) == (b"", 141)


def test_progress_on_a_terminal(run):
    """On a terminal verify draws its bar on stderr and stays readable on stdout."""
    import pty

    main_end, other_end = pty.openpty()
    words = [sys.executable, "-m", "ckpt.cli", "verify", run.url]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=other_end, env={**os.environ, "TERM": "xterm"})
    os.close(other_end)
    drawn = b""
    while True:
        try:
            block = os.read(main_end, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not block:
            break
        drawn += block
    os.close(main_end)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"verifying" in drawn
    assert out.startswith(b"step 300 (w1.3): every byte is right")


def test_the_terminal_gets_tables_that_fit(run):
    """On a terminal ls wraps to its width and marks the latest step."""
    import pty

    main_end, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "70"}
    process = subprocess.Popen([sys.executable, "-m", "ckpt.cli", "ls", run.url], stdout=other_end, env=environment)
    os.close(other_end)
    shown = b""
    while True:
        try:
            block = os.read(main_end, 4096)
        except OSError:
            break
        if not block:
            break
        shown += block
    os.close(main_end)
    assert process.wait(30) == 0
    assert b"latest" in shown


def test_sigint_removes_what_restore_wrote(run, tmp_path):
    """A real SIGINT in the middle of a restore ends with 130 and leaves no destination."""
    code = """
import os, signal, sys
from ckpt.reading.step import StepReader
from ckpt.cli import main
read = StepReader.read
def read_and_stop(self, *args, **kwargs):
    read(self, *args, **kwargs)
    os.kill(os.getpid(), signal.SIGINT)
StepReader.read = read_and_stop
sys.exit(main(sys.argv[1:]))
"""
    words = [sys.executable, "-c", code, "restore", run.url, str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "ckpt: stopped\n")
    assert not (tmp_path / "out").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
