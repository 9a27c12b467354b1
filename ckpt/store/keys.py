"""What a key may be: a relative ``/``-separated path that cannot leave the root of any store."""

from __future__ import annotations

from ckpt.errors import BadInputError

_COMPONENT_LIMIT_NBYTES = 255  # what ext4, xfs, NFS and Lustre allow for one name


def is_component(name: str) -> bool:
    """Whether ``name`` may stand between the slashes of a key.

    Names that begin with a dot are the file system's and the store's own (``..``, ``.nfs0001``, unfinished objects).
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= _COMPONENT_LIMIT_NBYTES
    except UnicodeEncodeError:  # a lone surrogate: no UTF-8 name
        return False


def check_key(key: str) -> list[str]:
    """The components of an object's key; BadInputError when it is not a clean relative path."""
    components = key.split("/")
    if not all(is_component(component) for component in components):
        raise BadInputError(
            f"{key!r}: not a key; expected a relative path without empty components, components that "
            f"begin with a dot, NULs, or names of more than {_COMPONENT_LIMIT_NBYTES} bytes"
        )
    return components


def check_prefix(prefix: str) -> list[str]:
    """The components of a folder's key; ``""`` is the root, with none."""
    return check_key(prefix) if prefix else []
