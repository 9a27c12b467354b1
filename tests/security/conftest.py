"""Real keepers for hostile clients."""

from __future__ import annotations

from tests.keeper.conftest import folder, url  # noqa: F401 - fixtures
