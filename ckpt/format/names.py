"""Names of tensors: paths of components, escaped so that different paths never share a name.

A name is its components, escaped, joined by ``.``. ``layers.0.weight`` is the path
``("layers", "0", "weight")``. A list's index is the text of the number; a *dict key* that is
not text has a marker, so that the keys ``"0"`` and ``0`` stay distinct:

======================= ==================== ====================================
component               escaped              example
======================= ==================== ====================================
text                    itself, with the     ``a.b`` -> ``a%2Eb``
                        escapes below
int                     ``%i`` digits        ``7`` -> ``%i7``
float                   ``%f`` hex           ``0.5`` -> ``%f0x1%2E0000000000000p-1``
bool, None              ``%T %F %N``         ``True`` -> ``%T``
bytes                   ``%x`` hex           ``b"a"`` -> ``%x61``
tuple                   ``%(`` ``%,`` ``%)`` ``("a", 1)`` -> ``%(a%,%i1%)``
======================= ==================== ====================================

In text ``.`` is ``%2E``, ``[`` is ``%5B``, ``%`` is ``%25``, a lone surrogate is ``%u`` and four hex
digits, empty text is ``%e``, and the component ``__metadata__`` (a reserved word of safetensors)
is ``%5F_metadata__``. Nothing else is escaped, and an escape has one spelling only.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable

from ckpt.errors import DamagedError, UnsupportedValueError

Component = str | int | float | bool | bytes | None | tuple["Component", ...]

_ESCAPES = {".": "%2E", "[": "%5B", "%": "%25"}
_UNESCAPES = {code: char for char, code in _ESCAPES.items()}
_SPECIAL = re.compile("[.\\[%\ud800-\udfff]")
_CODE = re.compile(r"%(?:2E|5B|25|u(D[89A-F][0-9A-F]{2}))")
_PLAIN_NAME = re.compile("[^.\\[%\ud800-\udfff]+(?:\\.[^.\\[%\ud800-\udfff]+)*")
_RESERVED = "__metadata__"
_RESERVED_ESCAPED = "%5F_metadata__"
_STOP = re.compile("%[,)]")
_MAX_DEPTH = 20  # of tuples in tuples


def escape(component: Component) -> str:
    """One component as it stands in a name. UnsupportedValueError for a type that no key may have."""
    kind = type(component)
    if kind is str:
        return _escape_text(component)  # type: ignore[arg-type]
    if component is None:
        return "%N"
    if kind is bool:
        return "%T" if component else "%F"
    if kind is int:
        return f"%i{_int_text(component)}"  # type: ignore[arg-type]
    if kind is float:
        return f"%f{_escape_text(float_text(component))}"  # type: ignore[arg-type]
    if kind is bytes:
        return f"%x{component.hex()}"  # type: ignore[union-attr]
    if kind is tuple:
        if _tuple_depth(component) > _MAX_DEPTH:  # type: ignore[arg-type]
            raise UnsupportedValueError(f"a key of tuples nested deeper than {_MAX_DEPTH} cannot be part of a name")
        return f"%({'%,'.join(escape(item) for item in component)}%)"  # type: ignore[union-attr]
    raise UnsupportedValueError(
        f"a key of type {kind.__module__}.{kind.__qualname__} cannot be part of a name; "
        "use str, int, bool, float, None, bytes or tuples of them"
    )


def unescape(text: str) -> Component:
    """The component that ``escape`` turned into ``text``. DamagedError for text that it never gives."""
    component, stop = _parse(text, 0, 0)
    if stop != len(text) or escape(component) != text:
        raise DamagedError(f"name component {text[:200]!r}: not an escaped component")
    return component


def join_name(path: Iterable[Component]) -> str:
    """The name of a path: ``("layers", "0", "a.b")`` -> ``layers.0.a%2Eb``.

    Give the index in a list as text (``str(i)``) and a dict's key as it is.
    """
    return ".".join(escape(component) for component in path)


def split_name(name: str) -> tuple[Component, ...]:
    """The path of a name: the inverse of ``join_name``. DamagedError for what is no name."""
    return tuple(unescape(text) for text in name.split("."))


def is_name(text: str) -> bool:
    """Whether ``text`` is a name: what ``join_name`` gives for some path."""
    if _RESERVED not in text and (_is_plain(text) or _PLAIN_NAME.fullmatch(text) is not None):
        return True
    try:
        split_name(text)
    except DamagedError:
        return False
    return True


def _is_plain(text: str) -> bool:
    """What ``_PLAIN_NAME`` says of most texts, sooner: thousands of names are looked at in every layout."""
    return (
        text.isascii()
        and "%" not in text
        and "[" not in text
        and ".." not in text
        and text[:1] not in {"", "."}
        and text[-1] != "."
    )


def float_text(value: float) -> str:
    """A float as text, bit for bit: ``float.hex()``, ``inf``, ``-inf`` or ``nan:<16 hex digits of its bits>``."""
    if math.isnan(value):
        return f"nan:{struct.pack('>d', value).hex()}"
    return value.hex() if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def float_from_text(text: str) -> float:
    """The float that ``float_text`` gave ``text`` for; ValueError for any other text."""
    if text.startswith("nan:") and len(text) == 20:
        value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
    elif len(text) > 40:
        raise ValueError("too long for a float")
    else:
        try:
            value = float.fromhex(text)
        except OverflowError:
            raise ValueError("too large for a float") from None
    if float_text(value) != text:
        raise ValueError("not the one spelling of this float")
    return value


def _escape_text(text: str) -> str:
    if text == "":
        return "%e"
    if text == _RESERVED:
        return _RESERVED_ESCAPED
    if _SPECIAL.search(text) is None:
        return text
    return _SPECIAL.sub(lambda match: _ESCAPES.get(match[0]) or f"%u{ord(match[0]):04X}", text)


def _unescape_text(text: str) -> str:
    if text == "%e":
        return ""
    if text == _RESERVED_ESCAPED:
        return _RESERVED
    if "%" not in text:
        return text
    return _CODE.sub(lambda match: chr(int(match[1], 16)) if match[1] else _UNESCAPES[match[0]], text)


def _tuple_depth(component: tuple[Component, ...]) -> int:
    depth, level = 1, [item for item in component if type(item) is tuple]
    while level and depth <= _MAX_DEPTH:
        depth, level = depth + 1, [inner for item in level for inner in item if type(inner) is tuple]
    return depth


def _int_text(value: int) -> str:
    # Beyond 64 bits in hex: Python refuses decimal texts above some 4,300 digits.
    return str(value) if value.bit_length() <= 64 else hex(value)


def _parse(text: str, start: int, depth: int) -> tuple[Component, int]:
    """The component at ``start`` and where it ends: at the end of ``text`` or before ``%,`` or ``%)``.

    Lenient: ``unescape`` then asks that escaping gives the same text again.
    """
    if text.startswith("%(", start):
        return _parse_tuple(text, start + 2, depth + 1)
    found = None if depth == 0 else _STOP.search(text, start)  # the nearer of the two, so that no text is read twice
    stop = len(text) if found is None else found.start()
    token = text[start:stop]
    try:
        return _parse_scalar(token), stop
    except ValueError:
        raise DamagedError(f"name component {text[:200]!r}: {token[:200]!r} is not an escaped key") from None


def _parse_tuple(text: str, position: int, depth: int) -> tuple[Component, int]:
    if depth > _MAX_DEPTH:
        raise DamagedError(f"name component {text[:80]!r}: tuples nested deeper than {_MAX_DEPTH}")
    items: list[Component] = []
    if text.startswith("%)", position):
        return (), position + 2
    while True:
        item, position = _parse(text, position, depth)
        items.append(item)
        if text.startswith("%)", position):
            return tuple(items), position + 2
        if not text.startswith("%,", position):
            raise DamagedError(f"name component {text[:200]!r}: a tuple that does not end in '%)'")
        position += 2


def _parse_scalar(token: str) -> Component:
    mark, rest = token[:2], token[2:]
    if token in ("%N", "%T", "%F"):
        return {"N": None, "T": True, "F": False}[token[1]]
    if mark == "%i":
        return int(rest, 16) if rest.lstrip("-").startswith("0x") else int(rest[:32])
    if mark == "%f":
        return float_from_text(_unescape_text(rest))
    if mark == "%x":
        return bytes.fromhex(rest)
    return _unescape_text(token)
