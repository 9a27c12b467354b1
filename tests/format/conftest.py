"""Property tests here take the same examples each time, and as long as a busy machine needs."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ckpt", deadline=None, derandomize=True, database=None)
settings.load_profile("ckpt")
