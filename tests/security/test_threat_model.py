"""Each claim of the threat model names a test; each of these tests is there."""

from __future__ import annotations

import ast
import re

from tests.security.hostile import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_named_test_exists():
    """In the file that is named, as a function that pytest collects."""
    text = (ROOT / "docs/threat-model.md").read_text()
    named = NAMED.findall(text)
    assert len(named) > 20
    assert text.count(".py::") == len(named), "a name that is not written as `tests/...py::test_...`"
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{file} has no {test}"


def test_security_md_leads_there():
    """The short form is found first."""
    assert "docs/threat-model.md" in (ROOT / "SECURITY.md").read_text()
