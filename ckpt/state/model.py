"""A module's state by names that no wrapper changes. Walked here: torch's own walk costs 106 ms per 800 parameters.

The path component that a wrapper adds is dropped by the wrapper's *type*, wherever it stands, so
a class whose own attribute is called ``module`` keeps its name. What a class or a hook says about
its state counts, as in ``state_dict()``: pre-hooks run (FSDP2 shards again in one),
``_save_to_state_dict`` and ``state_dict`` may be overridden, post-hooks may add, drop and rename.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt.errors import BadInputError, UnsupportedValueError
from ckpt.format.names import escape
from ckpt.format.values import ModuleNode
from ckpt.state.kinds import Order, stored_names
from ckpt.state.tensors import PLAIN_TYPES

if TYPE_CHECKING:
    from ckpt.state.load import Loading

EXTRA_STATE = "_extra_state"  # torch's key for what get_extra_state() gives

_FSDP1 = "_fsdp_wrapped_module"
_ODD = re.compile("[\\[%\ud800-\udfff]|__metadata__|\\.\\.|^\\.|\\.$|^$")


@functools.lru_cache(maxsize=100_000)
def escaped_key(key: str) -> str:
    """A state-dict key as part of a tensor's name: its components escaped one by one."""
    return key if _ODD.search(key) is None else ".".join(escape(component) for component in key.split("."))


class ModuleWalk:
    """The state of one module, found when the object is made.

    ``values``: state-dict key, without wrappers, -> the live parameter or buffer, an extra state, or
    whatever else a class puts there. ``first_keys``: key of a tied tensor -> the first key of the same one.
    """

    def __init__(self, root: nn.Module, where: str, world: int) -> None:
        self.values: OrderedDict[str, Any] = OrderedDict()
        self.values._metadata = OrderedDict()  # type: ignore[attr-defined] # hooks may write to it, as torch's do
        self.modules: dict[str, nn.Module] = {}  # key prefix without its dot -> module; wrappers left out
        self.first_keys: dict[str, str] = {}
        self._where = where
        self._world = world
        self._live: set[int] = set()  # ids of parameters and buffers
        self._trusted: set[int] = set()  # ids of parameters that DDP keeps equal
        self._sent: set[int] = set()  # ids of buffers that DDP sends from rank 0 before each forward
        self._visit(root, "", None)
        self._tie()

    def is_live(self, value: Any) -> bool:
        """Whether ``value`` is a parameter or buffer itself, so that a load may fill it in place."""
        return id(value) in self._live

    def is_trusted(self, value: Any) -> bool:
        """Whether all ranks hold an equal copy by construction."""
        return id(value) in self._trusted

    def first_rank_owns(self, value: Any) -> bool:
        """Whether rank 0's copy is the truth and the others may differ."""
        return id(value) in self._sent

    def owner(self, key: str) -> tuple[str, nn.Module]:
        """The innermost module that the key lies in, and its keys' prefix (with the dot)."""
        path = key
        while path:
            path = path.rpartition(".")[0]
            if path in self.modules:
                return f"{path}." if path else "", self.modules[path]
        return "", self.modules[""]

    def _visit(self, module: nn.Module, prefix: str, copies: _Copies | None) -> None:
        while (attribute := wrapper_attribute(type(module))) is not None:
            if attribute == _FSDP1:
                raise UnsupportedValueError(
                    f"{self._where}: FullyShardedDataParallel flattens parameters and loses their names; "
                    "shard with torch.distributed.fsdp.fully_shard"
                )
            _run_pre_hooks(module, prefix)
            if isinstance(module, nn.parallel.DistributedDataParallel):
                copies = _Copies(module, self._world)
            inner = module._modules[attribute]
            assert inner is not None, attribute
            module = inner
        self.modules[prefix[:-1]] = module
        if type(module).state_dict is not nn.Module.state_dict:
            self._visit_opaque(module, prefix, copies)
            return
        _run_pre_hooks(module, prefix)
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, prefix, True)
        self._take(own, prefix, _mapping(module._parameters), _mapping(module._buffers), copies)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{prefix}{name}.", copies)
        if module._state_dict_hooks:
            for hook in module._state_dict_hooks.values():
                changed = hook(module, self.values, prefix, {"version": module._version})
                self.values = self.values if changed is None else changed

    def _visit_opaque(self, module: nn.Module, prefix: str, copies: _Copies | None) -> None:
        """A class with a ``state_dict`` of its own: it speaks for everything below it."""
        found = OrderedDict[str, Any]()
        found._metadata = OrderedDict()  # type: ignore[attr-defined] # as torch's own
        returned: Any = module.state_dict(destination=found, prefix=prefix, keep_vars=True)
        if returned is not None:
            found = returned
        cut = len(prefix)
        own = {prefix + _without_wrappers(module, key[cut:]): value for key, value in found.items()}
        parameters = {_without_wrappers(module, name): p for name, p in module.named_parameters(remove_duplicate=False)}
        buffers = {_without_wrappers(module, name): b for name, b in module.named_buffers(remove_duplicate=False)}
        self._take(own, prefix, parameters, buffers, copies)
        for name, inner in module.named_modules():
            if wrapper_attribute(type(inner)) is None:
                self.modules[prefix + _without_wrappers(module, name) if name else prefix[:-1]] = inner

    def _take(
        self,
        own: dict[str, Any],
        prefix: str,
        parameters: Mapping[str, Any],
        buffers: Mapping[str, Any],
        copies: _Copies | None,
    ) -> None:
        cut = len(prefix)
        for key, value in own.items():
            name = key[cut:]
            if value is None:
                continue
            if parameters.get(name) is value:
                self._live.add(id(value))
                if copies is not None and copies.trusts(value):
                    self._trusted.add(id(value))
            elif buffers.get(name) is value:
                self._live.add(id(value))
                if copies is not None and copies.sends(value):
                    self._sent.add(id(value))
        self.values.update(own)

    def _tie(self) -> None:
        """Find parameters and buffers that are one: the same object, or the same elements of the same memory."""
        first: dict[Any, str] = {}
        for key, value in self.values.items():
            if id(value) not in self._live:
                continue
            if type(value) in PLAIN_TYPES and value.layout is torch.strided:
                storage = value.untyped_storage()._cdata
                same: Any = (storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
            else:
                # Of DTensors the local shard may be empty here and not elsewhere: identity is the same on every rank.
                same = id(value)
            known = first.setdefault(same, key)
            if known is not key:
                self.first_keys[key] = known


class _Copies:
    """What DistributedDataParallel promises of the tensors below it; nothing when it spans only some ranks."""

    def __init__(self, ddp: nn.parallel.DistributedDataParallel, world: int) -> None:
        self._spans_all = ddp.process_group.size() == world
        self._sends = self._spans_all and ddp.broadcast_buffers
        self._ignored: set[int] = set()
        ignored = ddp.parameters_to_ignore
        if ignored:
            named = (*ddp.module.named_parameters(), *ddp.module.named_buffers())
            self._ignored = {id(tensor) for name, tensor in named if name in ignored}

    def trusts(self, parameter: Any) -> bool:
        return self._spans_all and id(parameter) not in self._ignored

    def sends(self, buffer: Any) -> bool:
        return self._sends and id(buffer) not in self._ignored


_ATTRIBUTES: dict[type, str | None] = {}


def wrapper_attribute(kind: type[nn.Module]) -> str | None:
    """The attribute under which a wrapper class keeps the module that it wraps; None for any other class."""
    if kind not in _ATTRIBUTES:
        _ATTRIBUTES[kind] = _wrapper_attribute(kind)
    return _ATTRIBUTES[kind]


def _wrapper_attribute(kind: type[nn.Module]) -> str | None:
    # A module that nobody has imported has no instances: looking there costs no import.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    if dynamo is not None and issubclass(kind, dynamo.OptimizedModule):
        return "_orig_mod"
    if wrappers is not None and issubclass(kind, wrappers.ActivationWrapper):
        return "_checkpoint_wrapped_module"
    if fsdp is not None and issubclass(kind, fsdp.FullyShardedDataParallel):
        return _FSDP1
    return None


def _mapping(named: Any) -> Mapping[str, Any]:
    """Parameters or buffers by name; scripted modules have them in a class that cannot be asked for one."""
    return named if isinstance(named, dict) else dict(named.items())


def _run_pre_hooks(module: nn.Module, prefix: str) -> None:
    for hook in module._state_dict_pre_hooks.values():
        hook(module, prefix, True)


def _without_wrappers(root: nn.Module, key: str) -> str:
    """``key`` of ``root``'s state dict, or of a module in it, without what wrappers put in."""
    module: nn.Module | None = root
    kept: list[str] = []
    for component in key.split("."):
        from_wrapper = False
        while module is not None and (attribute := wrapper_attribute(type(module))) is not None:
            module = module._modules.get(attribute)
            if component == attribute:
                from_wrapper = True
                break
        if not from_wrapper:
            kept.append(component)
            module = None if module is None else module._modules.get(component)
    return ".".join(kept)


# -- loading --------------------------------------------------------------------------------


def fill_module(module: nn.Module, node: ModuleNode, prefix: str, loading: Loading) -> None:
    """Have ``module`` filled in place from the stored ``node``; what does not fit is noted in ``loading``.

    Parameters and buffers are filled as they are, so that optimizers and ties keep them. What a class
    computes for its state goes back through its own ``_load_from_state_dict`` or ``set_extra_state``.
    """
    walk = ModuleWalk(module, prefix, loading.world)
    expected: set[str] = set()
    tied: dict[str, list[str]] = {}  # first key -> all keys of one tensor
    given: dict[str, Any] = {}  # what classes compute, by key
    for key, value in walk.values.items():
        fqn = escaped_key(key)
        name = f"{prefix}.{fqn}"
        expected.add(name)
        if walk.is_live(value):
            loading.names.setdefault(id(value), []).append(name)
            tied.setdefault(walk.first_keys.get(key, key), []).append(key)
        elif fqn in node.extra:
            given[key] = loading.build(node.extra[fqn], (name,), like=value)
        elif (source := loading.resolve(name)) is not None:
            given[key] = loading.new(source, like=value)
        else:
            loading.target.missing.append(name)
    for keys in tied.values():
        _fill_tied(keys, walk, prefix, loading)
    inner = set(stored_names(node.extra))
    there = [name for name in loading.names_under(node.prefix) if name not in inner]
    there += [f"{node.prefix}.{fqn}" for fqn in node.extra]
    loading.target.unexpected += [name for name in there if name not in expected]
    loading.target.later(Order.MODULES, lambda: _give(walk, given, prefix))


def _fill_tied(keys: list[str], walk: ModuleWalk, prefix: str, loading: Loading) -> None:
    """Fill one tensor of the module, known by all of ``keys``, from the first of its names that the step has.

    A second tensor that the step holds under another of the names would be lost: that is a mismatch.
    """
    tensors = [walk.values[key] for key in keys]
    names = [f"{prefix}.{escaped_key(key)}" for key in keys]
    sources = {name: source for name in names if (source := loading.resolve(name)) is not None}
    if not sources:
        loading.target.missing += names
        loading.unfilled.update(id(tensor) for tensor in tensors)
        return
    first, source = next(iter(sources.items()))
    for name, other in sources.items():
        if other != source:
            loading.mismatch(name, "a tensor of its own", f"tied to {first}")
    filled = loading.fill(tensors[0], source, names[0])
    if filled is None:
        loading.unfilled.update(id(tensor) for tensor in tensors)
    elif filled is not tensors[0]:
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            loading.target.later(Order.TENSORS, lambda old=tensor: _become(old, filled, names[0]))  # type: ignore[misc]


def _become(old: torch.Tensor, new: torch.Tensor, name: str) -> None:
    """Make the object ``old`` be what ``new`` is, so that whoever refers to ``old`` (optimizers, ties) has it too."""
    attributes = dict(old.__dict__)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        new = new.detach()  # an object of its own, of the same memory
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call] # torch has it so
    except RuntimeError as error:
        raise BadInputError(
            f"{name}: on the meta device, or its elements share memory, and it cannot be replaced ({error}); call "
            "the module's to_empty(device=...) before loading"
        ) from None
    old.__dict__.update(attributes)


def _give(walk: ModuleWalk, given: dict[str, Any], prefix: str) -> None:
    """Hand computed state back to the classes that computed it, then run the hooks that follow any load."""
    rest: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        start, owner = walk.owner(key)
        if key == start + EXTRA_STATE and type(owner).set_extra_state is not nn.Module.set_extra_state:
            owner.set_extra_state(value)
        else:
            rest.setdefault(start, {})[key] = value
    for start, values in rest.items():
        owner = walk.modules[start[:-1]]
        errors: list[str] = []
        owner._load_from_state_dict(values, start, {"version": owner._version}, False, [], [], errors)
        if errors:
            kind = type(owner).__qualname__
            raise BadInputError(f"{prefix}.{start}*: {kind} refused its stored state: {'; '.join(errors)}")
    for module in walk.modules.values():
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, torch.nn.modules.module._IncompatibleKeys([], []))
