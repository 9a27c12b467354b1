"""What all tests share: one thread per process, and no process left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

# Two tests run at a time, some with several ranks each: more threads would only fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_SESSION = "CKPT_TEST_SESSION"  # inherited by every process that a test starts, however far down
_GRACE_S = 20.0  # keepers linger a little after a crash, on purpose


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[_SESSION] = f"{os.getpid()}-{time.monotonic_ns()}"


@pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a process that a test started outlives the workers; it is killed, and its test named."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        return  # without workers, this very process is the job that keepers and fork servers still serve
    deadline = time.monotonic() + _GRACE_S
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid, what in left.items():
        session.config.get_terminal_writer().line(f"\nleft behind: process {pid} {what}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``told``: how much of what there is a battery has covered."""
    told = [
        str(text)
        for report in terminalreporter.getreports("passed")
        for name, text in report.user_properties
        if name == "told" and report.when == "call"
    ]
    for text in sorted(told):
        terminalreporter.write_line(text)


def _left_behind() -> dict[int, str]:
    """Processes of this session but for this one: pid -> command, and the test during which it was started."""
    mark = f"{_SESSION}={os.environ[_SESSION]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # gone meanwhile, or another user's
            continue
        if mark in environment and int(folder.name) != os.getpid():
            tests = [
                entry.partition(b"=")[2].decode() for entry in environment if entry.startswith(b"PYTEST_CURRENT_TEST=")
            ]
            found[int(folder.name)] = f"{command[:200]} (started during {tests or 'no test'})"
    return found
