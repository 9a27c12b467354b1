"""The promises of the project as a whole."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tokenize
import tomllib
from pathlib import Path

import pytest

import ckpt

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
SCRIPTS = Path(sysconfig.get_path("scripts"))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_import_does_not_import_torch():
    """`import ckpt` is cheap: no torch, and none of what torch would bring."""
    done = run(sys.executable, "-c", "import ckpt, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


def test_public_names_are_sorted_and_true():
    """`ckpt.__all__` is sorted (constants, classes, functions), has no name twice, and every name in it is there."""
    kinds = {name: 0 if name.isupper() else 1 if name[0].isupper() else 2 for name in ckpt.__all__}
    assert ckpt.__all__ == sorted(kinds, key=lambda name: (kinds[name], name))
    assert [name for name in ckpt.__all__ if not hasattr(ckpt, name)] == []
    assert set(ckpt.__all__) <= set(dir(ckpt))


def test_an_unknown_public_name_is_an_attribute_error():
    """The lazy names do not swallow a typing error."""
    with pytest.raises(AttributeError, match="no_such_name"):
        ckpt.no_such_name  # noqa: B018 - the look-up is the test


def test_console_script():
    """`ckpt --help` runs from the installed script and names the verbs."""
    done = run(SCRIPTS / "ckpt", "--help")
    assert done.returncode == 0, done.stderr
    for verb in ("ls", "show", "verify", "diff", "restore", "rollback", "prune"):
        assert re.search(rf"\b{verb}\b", done.stdout), verb


def test_arrows_between_rooms():
    """The import contracts of pyproject.toml hold."""
    done = run(SCRIPTS / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_ruff_ignore_has_a_reason():
    """Each rule that is off says why, in pyproject.toml and beside the line it is off for."""
    lint = tomllib.loads(PYPROJECT)["tool"]["ruff"]["lint"]
    off = [*lint["ignore"], *(code for codes in lint["per-file-ignores"].values() for code in codes)]
    bare = [code for code in off if not re.search(rf'"{code}".* # .*\w\w', PYPROJECT)]
    for folder in ("ckpt", "trainer", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            with tokenize.open(path) as lines:
                comments = [t for t in tokenize.generate_tokens(lines.readline) if t.type == tokenize.COMMENT]
            bare += [
                f"{path.relative_to(ROOT)}:{comment.start[0]}: {comment.string}"
                for comment in comments
                if "noqa" in comment.string and not re.search(r"noqa: [A-Z]+\d+(, [A-Z]+\d+)* - \w", comment.string)
            ]
    assert bare == []


def test_every_test_says_what_it_shows():
    """Each test has a docstring."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


def test_one_version():
    """Code, installation, pyproject.toml and the changelog's first heading say the same version."""
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert ckpt.__version__ == version
    assert importlib.metadata.version("ckpt") == version
    assert newest is not None
    assert newest[1] == version


def test_py_typed_and_spec_are_shipped():
    """Type checkers see ckpt's types, and the format's description travels with its code."""
    package = Path(ckpt.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "format" / "SPEC.md").stat().st_size > 0
