"""ckpt.format.names: paths to names and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedError, UnsupportedValueError
from ckpt.format import names
from ckpt.format.names import (
    escape,
    float_from_text,
    float_text,
    is_name,
    join_name,
    split_name,
    unescape,
)

scalars = st.one_of(
    st.text(st.characters()),  # lone surrogates too
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.binary(),
    st.sampled_from(["", ".", "%", "[", "__metadata__", "%e", "%(", "%,", "%)", "0x1", 2**70, -(2**70)]),
)
components = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


@given(st.lists(components, min_size=1, max_size=4))
def test_round_trip(path):
    """A name splits into the path it was made of, types and bits included."""
    name = join_name(path)
    assert is_name(name)
    assert "[" not in name
    name.encode()  # no lone surrogate is left
    assert repr(split_name(name)) == repr(tuple(path))


@given(st.text(st.sampled_from(["a", "_", ".", "[", "%", "e", "é", "\ud800", " "]), max_size=8))
def test_the_quick_look_at_a_name_is_the_rule(text):
    """Plain ASCII names are told from others without the pattern, and alike."""
    matches = names._PLAIN_NAME.fullmatch(text) is not None
    assert names._is_plain(text) == (matches and text.isascii())


@given(st.lists(components, min_size=1, max_size=3), st.lists(components, min_size=1, max_size=3))
def test_different_paths_have_different_names(one, other):
    """No two paths share a name."""
    assert (join_name(one) == join_name(other)) == (repr(one) == repr(other))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("layers", "0", "attn", "wq", "weight"), "layers.0.attn.wq.weight"),
        (("a.b",), "a%2Eb"),
        (("a", "b"), "a.b"),
        (("w[0:5]", "100%"), "w%5B0:5]" + ".100%25"),
        ((0,), "%i0"),
        (("0",), "0"),
        (("",), "%e"),
        (("__metadata__",), "%5F_metadata__"),
        ((True, None, False), "%T.%N.%F"),
        ((b"a\0",), "%x6100"),
        ((("a", 1, ()),), "%(a%,%i1%,%(%)%)"),
        ((0.5,), "%f0x1%2E0000000000000p-1"),
        (("\ud800",), "%uD800"),
    ],
)
def test_spelling(path, name):
    """The spelling on disk, which SPEC.md fixes."""
    assert join_name(path) == name
    assert split_name(name) == path


@pytest.mark.parametrize(
    "text",
    [
        "", "a..b", ".", "a.", "a[0", "50%", "%2e", "%41", "%i", "%i01", "%i+1", "%i 1", "%i1_0", "%i0x1", "%f1.0",
        "%f1", "%f0x1%2E0p+0", "%xA", "%xAB", "%T1", "%(", "%(a", "%(a%,", "%(a%)b", "%)", "%,", "a%,b", "__metadata__",
        "%uD800%", "%u0041", "%ud800", "%e%e", "%fnan:1", "%i" + "9" * 5000, "%(" * 5000, "\ud800",
    ],
)  # fmt: skip
def test_refuses_what_is_no_name(text):
    """Text that no path gives is refused, in bounded time, by DamagedError only."""
    assert not is_name(text)
    with pytest.raises(DamagedError, match="name component"):
        split_name(text)


def test_refuses_keys_of_other_types():
    """A key that is no str, int, bool, float, None, bytes or tuple has no escaped form."""

    class Text(str):
        __slots__ = ()

    for key in (Text("a"), frozenset(), 1j, [1]):
        with pytest.raises(UnsupportedValueError, match="cannot be part of a name"):
            escape(key)
    deep: tuple[object, ...] = ()
    for _ in range(30):
        deep = (deep,)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        escape(deep)
    with pytest.raises(DamagedError, match="nested deeper"):
        unescape("%(" * 30 + "%)" * 30)


@given(st.floats())
def test_floats_keep_their_bits(value):
    """A float's text gives the same float, and only that text is accepted."""
    text = float_text(value)
    assert float_text(float_from_text(text)) == text
    assert math.isnan(value) or float_from_text(text) == value


@pytest.mark.parametrize(
    "text", ["1.0", "0x1p0", "INF", "nan", "nan:7ff0000000000000", "nan:zz", "0x1." + "0" * 99, ""]
)
def test_refuses_other_spellings_of_floats(text):
    """One spelling per float."""
    with pytest.raises(ValueError, match=r"."):
        float_from_text(text)
