"""How many elements are NaN or infinite, told from a tensor's bytes: for every dtype that can hold such a thing.

Exact and cheap: where all numbers are finite, which is nearly always, two passes of numpy's integer maximum prove it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class _Form(NamedTuple):
    """How a dtype's bits say that something is no finite number."""

    nbytes: int  # of one component
    largest: int  # IEEE: infinity's bits, above it NaN; else the bits of the only NaN, sign left out
    ieee: bool = True
    signed: bool = True  # whether the first bit is a sign that does not matter
    components: int = 1


_F16, _F32, _F64 = _Form(2, 0x7C00), _Form(4, 0x7F800000), _Form(8, 0x7FF0000000000000)
_FORMS: dict[str, _Form] = {
    "float16": _F16,
    "bfloat16": _Form(2, 0x7F80),
    "float32": _F32,
    "float64": _F64,
    "complex32": _F16._replace(components=2),
    "complex64": _F32._replace(components=2),
    "complex128": _F64._replace(components=2),
    "float8_e5m2": _Form(1, 0x7C),
    "float8_e4m3fn": _Form(1, 0x7F, ieee=False),
    # The NaN of these is what would be -0 elsewhere, and they have no infinity.
    "float8_e4m3fnuz": _Form(1, 0x80, ieee=False, signed=False),
    "float8_e5m2fnuz": _Form(1, 0x80, ieee=False, signed=False),
    "float8_e8m0fnu": _Form(1, 0xFF, ieee=False, signed=False),
}


def may_be_not_finite(dtype: str) -> bool:
    """Whether a dtype has a NaN or an infinity at all."""
    return dtype in _FORMS


def count_not_finite(view: memoryview | bytes | bytearray, dtype: str) -> tuple[int, int]:
    """(elements that are NaN, elements that are infinite) of whole elements of a dtype, as torch counts them.

    A complex number may be both. (0, 0) for a dtype that has neither.
    """
    form = _FORMS.get(dtype)
    if form is None or not len(view):
        return 0, 0
    import numpy as np

    bits = np.frombuffer(view, f"<u{form.nbytes}")
    if _all_finite(bits, form):
        return 0, 0
    if not form.ieee:
        shown = bits & 0x7F if form.signed else bits
        return int((shown == form.largest).sum()), 0
    magnitudes = bits & (_sign(form) - 1)
    nan: Any = magnitudes > form.largest
    inf: Any = magnitudes == form.largest
    if form.components > 1:
        nan, inf = (found.reshape(-1, form.components).any(axis=1) for found in (nan, inf))
    return int(nan.sum()), int(inf.sum())


def _all_finite(bits: Any, form: _Form) -> bool:
    """Without a temporary array: what is not finite has the largest bits among numbers of its sign."""
    if not form.signed:
        return bool(not (bits == form.largest).any())
    signs = bits.view(f"<i{form.nbytes}")
    return bool(signs.max() < form.largest and bits.max() < _sign(form) | form.largest)


def _sign(form: _Form) -> int:
    return 1 << (8 * form.nbytes - 1)
