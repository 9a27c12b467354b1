"""The fixtures of the keeper's tests: a folder for its sockets, in which none may be left, and a run with a writer."""

from tests.keeper.conftest import folder, url  # noqa: F401 - pytest finds fixtures by their names
