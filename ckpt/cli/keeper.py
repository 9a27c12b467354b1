"""``ckpt keeper status [--json]``: what the keepers of this user on this node are doing.

A keeper is the process that has a job's snapshots and writes them; each job has one on each of its nodes.
No keeper is no error: the exit code is 0 whatever is found.

JSON: ``{"keepers": [{"pid", "job", "uptime_s", "ends_in_s": seconds or null, "log", "clients": [{"rank",
"pid"}], "saves": [{"run", "step", "attempt", "world", "ranks": [{"rank", "state", "nbytes_written",
"nbytes"}], "missing": [rank], "failure"}], "arenas": [{"arena", "run", "rank", "nbytes", "state"}],
"runs": [{"run", "nbytes", "snapshots", "budget_bytes": bytes or null}], "available_nbytes",
"available_by"}], "silent": [{"pid", "log"}]}``. ``ends_in_s`` is null while trainers are connected or saves are
under way. A save's ``missing`` ranks have no durable part yet, as far as this keeper knows; its ``failure`` says
why it will not become a step, if so. ``silent`` are keepers that live and do not answer.
"""

from __future__ import annotations

import argparse

import msgspec

from ckpt.cli.output import counted, emit_json, nbytes_text, say, seconds_text, table
from ckpt.keeper.protocol import SaveStatus, Status
from ckpt.keeper.saves import name_ranks
from ckpt.keeper.settle import Silent, keepers

_STYLES = {"failed": "red", "stuck": "red", "durable": "dim", "free": "dim"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("what", metavar="status", choices=["status"], help="what to do: tell what they are doing")


def run(arguments: argparse.Namespace) -> int:
    """Ask every keeper, and say what it answers."""
    found = keepers()
    status = [answer for answer in found if isinstance(answer, Status)]
    silent = [answer for answer in found if isinstance(answer, Silent)]
    if arguments.json:
        documents = [
            {name: value for name, value in msgspec.to_builtins(answer).items() if name not in {"type", "request"}}
            for answer in status
        ]
        emit_json({"keepers": documents, "silent": msgspec.to_builtins(silent)})
        return 0
    for i, answer in enumerate(status):
        if i:
            say()
        _print(answer)
    for lost in silent:
        say(f"keeper {lost.pid} lives and does not answer: it is stopped, or of another version", "red")
        say(f"log      {lost.log}")
    if not found:
        say("no keeper is running here: no job of this user is saving, or lingers after a crash, on this node")
    return 0


def _print(status: Status) -> None:
    say(f"keeper   {status.pid}, up {seconds_text(status.uptime_s)}", "bold")
    say(f"job      {status.job}")
    trainers = ", ".join(f"rank {client.rank} (pid {client.pid})" for client in status.clients)
    say(f"ranks    {trainers or _why_alone(status)}")
    for used in status.runs:
        budget = "no budget" if used.budget_bytes is None else f"budget {nbytes_text(used.budget_bytes)}"
        one_or_two = counted(used.snapshots, "snapshot")
        say(f"memory   {nbytes_text(used.nbytes)} for {used.run} ({one_or_two} a rank, {budget})")
    say(f"         {nbytes_text(status.available_nbytes)} more can be had ({status.available_by})")
    say(f"log      {status.log}")
    if status.saves:
        say()
        _print_saves(status.saves)
    if status.arenas:
        say()
        rows = [[str(a.arena), a.run, str(a.rank), nbytes_text(a.nbytes), a.state] for a in status.arenas]
        styles = [_STYLES.get(arena.state) for arena in status.arenas]
        table(["arena", "run", "rank", "size", "state"], rows, right=("arena", "rank", "size"), styles=styles)


def _why_alone(status: Status) -> str:
    if status.saves:
        verb = "is" if len(status.saves) == 1 else "are"
        return f"none is connected; ends when {counted(len(status.saves), 'save')} {verb} done"
    if status.ends_in_s is None:
        return "none is connected"
    return f"none is connected; ends in {seconds_text(status.ends_in_s)} unless one comes back"


def _print_saves(saves: tuple[SaveStatus, ...]) -> None:
    rows, styles = [], []
    for save in saves:
        for rank in save.ranks:
            written = f"{nbytes_text(rank.nbytes_written)} of {nbytes_text(rank.nbytes)}"
            rows.append([str(save.step), save.attempt, save.run, str(rank.rank), rank.state, written])
            styles.append(_STYLES.get(rank.state))
    table(["step", "attempt", "run", "rank", "state", "written"], rows, right=("step", "rank"), styles=styles)
    for save in saves:
        which = f"step {save.step} ({save.attempt})"
        if save.failure:
            say(f"{which} is being removed: {save.failure}", "red")
        elif save.missing:
            say(f"{which} waits for {name_ranks(save.missing)} of {save.world}")
        else:
            say(f"{which}: all parts are durable, COMMIT is being written")
