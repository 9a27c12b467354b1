from __future__ import annotations

import json
from pathlib import Path

from ckpt.format.commit import COMMIT
from tests.cli.conftest import ckpt


def damage(run, step):
    path = next(Path(run.url).glob(f"step-{step:08d}-*/model-00001-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[4096] ^= 4  # the first byte behind the header
    path.write_bytes(content)
    return str(path.relative_to(run.url))


def test_a_good_step(run, capsys):
    """A good step is exit code 0 and one line."""
    code, out, err = ckpt(capsys, "verify", run.url)
    assert (code, err) == (0, "")
    assert out.startswith("step 300 (w1.3): every byte is right (4 tensors in ")
    assert out.count("\n") == 1


def test_damage_is_exit_code_4(run, capsys):
    """Every problem is a line that names file, tensor and chunk."""
    file = damage(run, 200)
    code, out, err = ckpt(capsys, "verify", run.url, "--step", 200)
    assert (code, err) == (4, "")
    first, second = out.splitlines()
    assert first.startswith("step 200 (w1.2): 1 problem, which cannot be repaired from here (")
    assert second.startswith(f"  {file}: model.w[32:64,0:32]: chunk 0: digest ")
    assert ckpt(capsys, "verify", run.url)[0] == 0


def test_all_steps(run, capsys):
    """--all has a report for each step; one bad step makes the exit code 4."""
    damage(run, 200)
    code, out, _ = ckpt(capsys, "verify", run.url, "--all", "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (4, False)
    assert [(report["step"], report["ok"]) for report in document["reports"]] == [
        (100, True),
        (200, False),
        (300, True),
    ]
    (problem,) = document["reports"][1]["problems"]
    assert (problem["tensor"], problem["chunk"]) == ("model.w[32:64,0:32]", 0)
    code, out, _ = ckpt(capsys, "verify", run.url, "--all")
    assert (code, len(out.splitlines())) == (4, 4)


def test_a_torn_commit_is_a_problem(run, capsys):
    """A latest step whose COMMIT is torn is damage, not silence, though an older step is fine."""
    path = next(Path(run.url).glob(f"step-00000300-*/{COMMIT}"))
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = ckpt(capsys, "verify", run.url, "--json")
    (report,) = json.loads(out)["reports"]
    assert code == 4
    assert (report["step"], [p["file"] for p in report["problems"]]) == (200, ["step-00000300-w1.3/COMMIT"])


def test_step_and_all_exclude_each_other(run, capsys):
    """One cannot ask for one step and for all."""
    code, _, err = ckpt(capsys, "verify", run.url, "--step", 100, "--all")
    assert (code, err) == (2, "ckpt: --step and --all exclude each other; give one of them\n")
