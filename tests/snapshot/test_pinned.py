"""Page-locking through the real bindings, on a machine without a GPU: no driver at all, and a stand-in for libcuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIBCUDA = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int depth, retained, registered;
static int fail(const char *what) { const char *f = getenv("FAIL"); return f && !strcmp(f, what); }
static void say(const char *what, unsigned long long a, unsigned long long b, unsigned f) {
  printf("%s %llu %llu %u depth %d\n", what, a, b, f, depth); fflush(stdout); }
int cuInit(unsigned f) { return fail("cuInit") ? 100 : 0; }
int cuDriverGetVersion(int *v) { *v = 13040; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)64; retained++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { retained--; return 0; }
int cuCtxPushCurrent_v2(void *c) { depth++; return c == (void *)64 ? 0 : 201; }
int cuCtxPopCurrent_v2(void **c) { *c = (void *)64; depth--; return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) {
  if (fail("cuMemHostRegister")) return 2;
  registered++; say("register", (unsigned long long)p, n, f); return depth == 1 ? 0 : 201; }
int cuMemHostUnregister(void *p) { registered--; say("unregister", (unsigned long long)p, 0, 0); return 0; }
int cuGetErrorName(int e, const char **s) {
  *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "words"; return 0; }
void state(void) { printf("retained %d depth %d registered %d\n", retained, depth, registered); fflush(stdout); }
struct entry { const char *name; void *at; } table[] = {
  {"cuInit", cuInit}, {"cuDriverGetVersion", cuDriverGetVersion}, {"cuDeviceGet", cuDeviceGet},
  {"cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain}, {"cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2},
  {"cuCtxPushCurrent", cuCtxPushCurrent_v2}, {"cuCtxPopCurrent", cuCtxPopCurrent_v2},
  {"cuMemHostRegister", cuMemHostRegister_v2}, {"cuMemHostUnregister", cuMemHostUnregister},
  {"cuGetErrorName", cuGetErrorName}, {"cuGetErrorString", cuGetErrorString}};
int cuGetProcAddress_v2(const char *name, void **at, int version, unsigned long long flags, void *status) {
  *at = 0;
  for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(table[i].name, name)) *at = table[i].at;
  if (!strcmp(name, "cuGetProcAddress")) *at = cuGetProcAddress_v2;
  if (status) *(int *)status = *at ? 0 : 1;
  return *at ? 0 : 500; }
"""

PROGRAM = """
import ctypes
from ckpt.snapshot.pinned import RefusedError, register, unregister
try:
    register(4096, 8192, 0)
    unregister(4096, 0)
except RefusedError as error:
    print("refused:", error, flush=True)
    try:
        register(4096, 8192, 0)
    except RefusedError as again:
        print("again:", again, flush=True)
libcuda = {libcuda}
if libcuda:
    ctypes.CDLL("libcuda.so.1").state()
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that notes what it is asked."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "cuda.c").write_text(LIBCUDA)
    words = [compiler, "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so.1", folder / "cuda.c"]
    subprocess.run(words, check=True)
    return folder


def said(fake: Path | None, **env: str) -> list[str]:
    """The lines of a process that page-locks memory with the given libcuda, or with none."""
    if fake is not None:
        env["LD_LIBRARY_PATH"] = str(fake)
    words = [sys.executable, "-c", PROGRAM.format(libcuda=fake is not None)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **env})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_with_a_driver(fake: Path):
    """Memory is registered for all devices in the primary context, and nothing is left pushed or retained."""
    assert said(fake) == [
        "register 4096 8192 1 depth 1",
        "unregister 4096 0 0 depth 1",
        "retained 0 depth 0 registered 0",
    ]


def test_a_driver_that_refuses(fake: Path):
    """The error is told by its name, the next try gets an answer of its own, and nothing is left behind."""
    refused = "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"
    assert said(fake, FAIL="cuMemHostRegister") == [
        f"refused: {refused}",
        f"again: {refused}",
        "retained 0 depth 0 registered 0",
    ]


def test_a_driver_without_a_device(fake: Path):
    """Whatever fails first is named."""
    assert said(fake, FAIL="cuInit")[0] == "refused: cuInit: CUDA_ERROR_NO_DEVICE"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_driver():
    """Refused at once, in words, every time."""
    first, again = said(None)
    assert first.startswith("refused: cuInit: ")
    assert again.removeprefix("again: ") == first.removeprefix("refused: ")
