"""Page-locked memory through the CUDA driver itself: its errors are answers, and wait in no queue for the training.

The runtime (``torch.cuda.cudart``) would remember a refusal and hand it to whichever of the job's kernels comes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for the contexts of all devices


class RefusedError(Exception):
    """The driver has answered with an error, or there is none."""


def register(address: int, nbytes: int, device: int) -> None:
    """Page-lock host memory for all devices; ``device`` is one whose primary context is in use. RefusedError."""
    driver = _driver()
    with _context(driver, device):
        _ask(driver, driver.cuMemHostRegister, address, nbytes, _PORTABLE)


def unregister(address: int, device: int) -> None:
    """Undo ``register``, before the memory is unmapped. RefusedError, as when the driver is shutting down."""
    driver = _driver()
    with _context(driver, device):
        _ask(driver, driver.cuMemHostUnregister, address)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RefusedError(f"the package cuda-python is not usable: {error}") from error
    _ask(driver, driver.cuInit, 0)
    return driver


@contextlib.contextmanager
def _context(driver: Any, ordinal: int) -> Iterator[None]:
    """The device's primary context, the one that torch works in, made current: this thread may have none."""
    device = _ask(driver, driver.cuDeviceGet, ordinal)
    context = _ask(driver, driver.cuDevicePrimaryCtxRetain, device)
    try:
        _ask(driver, driver.cuCtxPushCurrent, context)
        try:
            yield
        finally:
            _ask(driver, driver.cuCtxPopCurrent)
    finally:
        _ask(driver, driver.cuDevicePrimaryCtxRelease, device)


def _ask(driver: Any, call: Any, *arguments: Any) -> Any:
    """What a call of the driver returns beside its error code."""
    try:
        code, *returned = call(*arguments)
    except RuntimeError as error:  # no libcuda, or one without this function
        raise RefusedError(f"{call.__name__}: {error}") from error
    if int(code):
        _, name = driver.cuGetErrorName(code)
        raise RefusedError(f"{call.__name__}: {name.decode() if name else f'error {int(code)}'}")
    return returned[0] if returned else None
