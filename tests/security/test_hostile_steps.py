"""Steps that claim, nest or repeat without measure, and text that terminals obey: refused, within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ckpt.cli.output import say, table
from ckpt.errors import CkptError, DamagedError, printable
from ckpt.format.commit import COMMIT
from ckpt.format.writer import decode_writer, encode_writer
from tests.security.hostile import Attack, Hostile, Outcome, carried_out, check

DIGEST = "0" * 32
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\nok: every byte is right\n\u202egnp.exe\u200b\x9b31m"
SHOWN_ESCAPED = r"\x1b[2J\x1b]0;owned\x07\r\nok: every byte is right\n\u202egnp.exe\u200b\x9b31m"


def claims(shape: list[int]) -> Callable[[Hostile], None]:
    """The layout says so; there is one chunk."""

    def act(run: Hostile) -> None:
        layout = run.layout()
        layout["tensors"][0] |= {"dtype": "uint8", "shape": shape}
        run.put_layout(layout)

    return act


def file_claims(nbytes: int) -> Callable[[Hostile], None]:
    """Layout and part say so, and the part has one digest."""

    def act(run: Hostile) -> None:
        layout = run.layout()
        layout["tensors"][0] |= {"dtype": "uint8", "shape": [nbytes]}
        run.put_layout(layout)
        run.put_file(0, nbytes=4096 + nbytes)

    return act


def many_chunks(run: Hostile) -> None:
    """Half a million digests for a file of one chunk."""
    run.put_file(0, chunks=[DIGEST] * 500_000)


def many_packed_chunks(run: Hostile) -> None:
    """The same in a pack: 400,000 chunks of one byte."""
    packed = [[DIGEST, offset, 1, "raw"] for offset in range(400_000)]
    run.put_file(0, bytes(400_000), nbytes=400_000, packed=packed)


def large_mesh(run: Hostile) -> None:
    """A million ranks in a mesh of a step that one rank saved."""
    layout = run.layout()
    layout["meshes"].append({"shape": [1000, 1000], "ranks": list(range(1_000_000))})
    layout["tensors"][0] |= {"mesh": len(layout["meshes"]) - 1, "placements": ["S0", "R"]}
    run.put_layout(layout)


def many_pieces(run: Hostile) -> None:
    """A tensor in a million pieces, all of one rank."""
    layout = run.layout()
    layout["tensors"][0] |= {"shape": [1_000_000], "dtype": "uint8", "owners": [0] * 1_000_000}
    run.put_layout(layout)


def aliases(*pairs: tuple[str, str]) -> Callable[[Hostile], None]:
    def act(run: Hostile) -> None:
        run.put_layout(run.layout() | {"aliases": dict(pairs)})

    return act


def world(ranks: int, parts: int) -> Callable[[Hostile], None]:
    """COMMIT of so many ranks, with so many parts named."""

    def act(run: Hostile) -> None:
        commit = run.commit()
        commit["world"] = ranks
        commit["layouts"][0]["ranks"] = [[0, ranks - 1]]
        commit["parts"] = [
            {"name": f"part-{r:05d}-of-{ranks:05d}.json", "nbytes": 1, "digest": DIGEST} for r in range(parts)
        ]
        run.put_commit(commit)

    return act


def value(node: Any) -> Callable[[Hostile], None]:
    def act(run: Hostile) -> None:
        part = run.part()
        part["values"]["epoch"] = node
        del part["values_digests"]["epoch"]
        run.put_part(part)

    return act


def nested(depth: int) -> Any:
    node: Any = 0
    for number in range(depth):
        node = [node] if number % 2 else {"t": "tuple", "v": [node]}
    return node


def deep_part(depth: int) -> Callable[[Hostile], None]:
    """Nested by hand: Python's own JSON writer does not go so deep."""

    def act(run: Hostile) -> None:
        raw = json.dumps(run.part(), separators=(",", ":")).encode()
        run.put_part(raw.replace(b'"epoch":2', b'"epoch":' + b"[" * depth + b"]" * depth))

    return act


def own(values: dict[str, Any], rank_values: dict[str, Any]) -> Callable[[Hostile], None]:
    def act(run: Hostile) -> None:
        part = run.part()
        part["values"].update(values)
        part["values_digests"] = {}
        run.put_part(part | {"rank_values": rank_values})

    return act


def colliding(run: Hostile) -> None:
    """Python gives all of these keys the hash 0: a dict of them would take an hour."""
    prime = 2**61 - 1
    flat: list[Any] = []
    for number in range(1, 50_000):
        flat += [{"t": "int", "v": hex(prime * number)}, 0]
    value({"t": "dict", "v": flat})(run)


def long_name(text: str) -> Callable[[Hostile], None]:
    def act(run: Hostile) -> None:
        layout = run.layout()
        layout["tensors"][1]["name"] = text
        run.put_layout(layout)

    return act


def speaking(run: Hostile) -> None:
    """Every text that is shown to people."""
    layout = run.layout()
    layout["aliases"] = {ESCAPES.replace("[", "%5B").replace(".", "%2E"): "x"}
    run.put_layout(layout)
    part = run.part()
    part["values"][ESCAPES] = {ESCAPES: ESCAPES}
    part["values"][ESCAPES] = {"t": "dict", "v": [ESCAPES, ESCAPES]}
    run.put_part(part)
    run.put_commit(run.commit() | {"written_by": ESCAPES})
    path = run.path / "writers/000001.json"
    record = decode_writer(path.read_bytes(), "writer")
    path.write_bytes(encode_writer(replace(record, job=ESCAPES, host=ESCAPES, nonce=ESCAPES)))


def unknown_feature(run: Hostile) -> None:
    run.put_commit(run.commit() | {"features": [ESCAPES, {"a": [1] * 10}, 10**400, None], "written_by": [[[ESCAPES]]]})


def torn(run: Hostile) -> None:
    (run.folder / COMMIT).write_bytes(ESCAPES.encode())


LOADS = frozenset({"load", "verify"})  # unseen: the file is as its author wanted it
NO_TEMPLATE = frozenset({"load"})  # the state that load is given has other shapes, and says so

ATTACKS: dict[str, Attack] = {
    "a tensor of 2**62 bytes": Attack(claims([2**62]), unseen=NO_TEMPLATE),
    "a tensor of 2**62 bytes in 64 dimensions": Attack(claims([2] * 62 + [1, 1]), unseen=NO_TEMPLATE),
    "a tensor of 2**64 bytes": Attack(claims([2**32, 2**32])),
    "a tensor of 2**40 bytes": Attack(claims([2**40]), unseen=NO_TEMPLATE),
    "a file of 2**40 bytes": Attack(file_claims(2**40)),
    "half a million chunks": Attack(many_chunks),
    "zstd: many chunks": Attack(many_packed_chunks),
    "a mesh of a million ranks": Attack(large_mesh),
    "a tensor of a million pieces": Attack(many_pieces, says="1000000 pieces of each shard"),
    "an alias of itself": Attack(aliases(("a", "a")), says="stands for 'a'"),
    "aliases in a ring": Attack(aliases(("a", "b"), ("b", "a")), says="stands for"),
    "an alias over a tensor": Attack(aliases(("x", "model.w")), says="a tensor's name"),
    "a world of 2**24 ranks": Attack(world(1 << 24, 1), says="1 parts for a world of 16777216"),
    "a world of 2**62 ranks": Attack(world(1 << 62, 1), says="world 4611686018427387904"),
    "3,000 parts that are not there": Attack(world(3000, 3000)),
    "a value nested 201 levels": Attack(value(nested(202))),
    "a value nested 199 levels": Attack(value(nested(199)), unseen=LOADS),
    "a value nested 900 levels": Attack(deep_part(900)),
    "a value nested a million levels": Attack(deep_part(1_000_000)),
    "keys of one hash": Attack(colliding, says="keys of one hash"),
    "an int of a million digits": Attack(value({"t": "int", "v": "0x" + "f" * 1_000_000}), unseen=LOADS),
    "a range without end": Attack(value({"t": "range", "v": [0, {"t": "int", "v": hex(2**62)}, 1]}), unseen=LOADS),
    "a value that stands for no tensor": Attack(
        value({"t": "tensor", "name": "nothing"}), unseen=frozenset({"verify"})
    ),
    "own values in a ring": Attack(
        own({"epoch": {"t": "rank", "key": "a"}}, {"a": {"t": "rank", "key": "a"}}), unseen=frozenset({"verify"})
    ),
    "a name of a long tuple": Attack(long_name("%(" + "a%," * 100_000 + "a"), says="no name by the escaping rule"),
    "a name of two million characters": Attack(long_name("x" * 2_000_000), unseen=frozenset({"verify"})),
    "text for a terminal": Attack(speaking, unseen=LOADS),
    "text for a terminal, in features": Attack(unknown_feature, spread=True),
    "text for a terminal, in a torn COMMIT": Attack(torn),
}

pytestmark = pytest.mark.timeout(420)  # the first test waits for all attacks, by one child


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return carried_out(__name__, tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_step_is_refused_in_bounded_memory_and_time(outcomes: dict[str, Outcome], name: str):
    """Each verb ends in seconds and 200 MiB with a sentence; none of it is an accident of Python's."""
    attack, outcome = ATTACKS[name], outcomes[name]
    check(attack, outcome)
    for heard in outcome.heard:
        assert not set("\u202e\x9b\x07\x1b") & set(heard.text), heard


def test_text_of_a_checkpoint_is_shown_escaped(outcomes: dict[str, Outcome]):
    """It is there to be read, and stays on its line."""
    outcome = outcomes["text for a terminal"]
    assert SHOWN_ESCAPED in outcome.of("ls").text
    shown = outcome.of("show").text
    assert sum(SHOWN_ESCAPED in line for line in shown.splitlines()) >= 3, shown
    assert not any(
        line.startswith("ok: every byte is right") for heard in outcome.heard for line in heard.text.splitlines()
    )


def test_printable_leaves_text_as_it_is():
    """Only what is not printable changes, and what a caller keeps is kept."""
    assert printable("é 日本 😀 a.b[0:3]") == "é 日本 😀 a.b[0:3]"
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    assert str(DamagedError(f"x{ESCAPES}")) == "x" + SHOWN_ESCAPED.replace("\\n", "\n")
    assert str(CkptError()) == ""


def test_what_the_command_line_prints_is_printable(capsys: pytest.CaptureFixture[str]):
    """Lines and tables alike; a cell is cut."""
    say(ESCAPES)
    table(["name"], [[ESCAPES], ["x" * 5000]])
    told = capsys.readouterr().out
    assert all(line.isprintable() for line in told.splitlines())
    assert told.count(SHOWN_ESCAPED) == 2
    assert "x" * 2000 in told
    assert "x" * 2001 not in told


def test_a_commit_that_grew_is_refused_before_it_is_read(outcomes: dict[str, Outcome]):
    """A world that is claimed is compared with the parts before anything is made for each rank."""
    for name in ("a world of 2**24 ranks", "a world of 2**62 ranks"):
        assert all(heard.mib < 40 for heard in outcomes[name].heard), outcomes[name]
