"""An optimizer's state by the names of its parameters, so that no order of declaration, group or rank matters.

The tensor ``exp_avg`` of parameter ``model.layers.0.weight`` is stored as
``optimizer.state.exp_avg.model.layers.0.weight``. What is no tensor stands in the node, and
tensors nested in it (LBFGS keeps lists of them) are ``optimizer.nested.<state key>.<parameter>.<path>``, the
parameter's name being one escaped component. Exactly what was saved comes back: a parameter
without state has none, whatever ``requires_grad`` and ``grad`` say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import UnsupportedValueError
from ckpt.format.names import Component, escape, unescape
from ckpt.format.values import OptimizerNode, TensorRef
from ckpt.state.kinds import Order
from ckpt.state.model import escaped_key
from ckpt.state.tensors import dtype_of, is_dtensor, real_device

if TYPE_CHECKING:
    from ckpt.state.flatten import Flattener
    from ckpt.state.load import Loading

PARAMETERS = "params"
NAMES = "param_names"  # torch's key for the names that named_parameters() gave
_MOMENTS = {"Adafactor": 0, "Adagrad": 1, "Muon": 1, "RMSprop": 1}  # of a parameter's size each; most others keep 2
NO_PARAMETER = ""  # state that an optimizer keeps under a key of its own


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, node: OptimizerNode, group: str, path: tuple[Component, ...], sink: Flattener
) -> None:
    """Fill ``node`` with the settings and plain state of ``optimizer``, and note its tensors down in ``sink``.

    Raises UnsupportedValueError for an optimizer whose state is not all in ``state`` and
    ``param_groups``, and for a parameter whose name cannot be known.
    """
    _refuse_hidden_state(optimizer, node.prefix)
    names: dict[int, str] = {}
    for index, settings in enumerate(optimizer.param_groups):
        own_names = settings.get(NAMES)
        here = []
        for position, parameter in enumerate(settings[PARAMETERS]):
            name = _name(parameter, sink.names, own_names[position] if own_names else None)
            if name is None:
                raise UnsupportedValueError(_nameless(node.prefix, parameter, position, index))
            names[id(parameter)] = name
            here.append(name)
            if parameter.requires_grad and not sink.own_rank:
                sink.trained.add(name)
        if not sink.own_rank:  # a rank's own tensors have their own names
            sink.stepped.update(here)
        saved: dict[str, Any] = {
            key: sink.tree(value, (*path, "groups", str(index), key))
            for key, value in settings.items()
            if key not in (PARAMETERS, NAMES)
        }
        saved[PARAMETERS] = here
        node.groups.append(saved)
    starts = _Starts(node.prefix)
    states: dict[Any, Any] = optimizer.state  # keyed by parameters, and by whatever else an optimizer likes
    for parameter, state in states.items():
        if isinstance(parameter, torch.Tensor):
            known = names.get(id(parameter)) or _name(parameter, sink.names, None)
            if known is None:
                raise UnsupportedValueError(
                    f"{node.prefix}: has state for a parameter of shape {tuple(parameter.shape)} that is in none of "
                    "its groups and in no module of the state; delete that state or put the module into the state"
                )
            _flatten_parameter(parameter, known, state, starts, node, group, path, sink)
        else:
            inner = sink.tree(state, (*path, "nested", parameter, NO_PARAMETER))
            node.state.setdefault(NO_PARAMETER, {})[parameter] = inner


class _Starts(dict[str, str]):
    """What the names of an optimizer's tensors begin with, by state key."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __missing__(self, key: str) -> str:
        start = self[key] = f"{self._prefix}.state.{escape(key)}."
        return start


def _flatten_parameter(
    parameter: torch.Tensor,
    name: str,
    state: dict[Any, Any],
    starts: _Starts,
    node: OptimizerNode,
    group: str,
    path: tuple[Component, ...],
    sink: Flattener,
) -> None:
    own_rank = sink.own_rank
    trusted = id(parameter) in sink.trusted  # what keeps replicas of a parameter equal keeps its moments equal
    others = [] if own_rank else [other for other in sink.names.get(id(parameter), ()) if other != name]
    row = f"{node.prefix}.state.{name}"
    simple = not (own_rank or others)
    if simple and (leaves := sink.inspector.again(row, state, trusted=trusted)) is not None:
        sink.tensors += leaves
        sink.stepped.update(sink.inspector.names(row))
        return
    plain: dict[Any, Any] = {}
    noted: list[str] = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and type(key) is str:
            start = starts[key]
            sink.note(value, start + name, group, trusted=trusted)
            noted.append(start + name)
            for other in others:
                sink.aliases[start + other] = start + name
        else:
            plain[key] = sink.tree(value, (*path, "nested", key, name))
    if not own_rank:
        sink.stepped.update(noted)
    if plain:
        node.state[name] = plain
    elif simple:
        sink.inspector.remember(row, state, noted)


def _name(parameter: torch.Tensor, names: dict[int, list[str]], own_name: str | None) -> str | None:
    known = names.get(id(parameter))
    if known:
        return known[0]
    return None if own_name is None else escaped_key(own_name)


def _nameless(prefix: str, parameter: torch.Tensor, position: int, group: int) -> str:
    return (
        f"{prefix}: parameter {position} of group {group}, of shape {tuple(parameter.shape)}, belongs to no module of "
        "the state, so its name is not known; put its module into the state, or build the optimizer from "
        "named_parameters()"
    )


def _refuse_hidden_state(optimizer: torch.optim.Optimizer, prefix: str) -> None:
    kind = type(optimizer)
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        raise UnsupportedValueError(
            f"{prefix}: ZeroRedundancyOptimizer keeps each parameter's state on one rank only; "
            "shard with torch.distributed.fsdp.fully_shard and use a plain optimizer"
        )
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        hidden = sorted(str(key) for key in set(optimizer.state_dict()) - {"state", "param_groups"})
        if hidden:
            raise UnsupportedValueError(
                f"{prefix}: {kind.__module__}.{kind.__qualname__} has state beyond 'state' and 'param_groups' "
                f"({', '.join(hidden)}), which would be lost; put the wrapped optimizer and the rest into the state "
                "apart"
            )


def moments_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer's state will take on this rank, by its kind, as long as it has none; else 0."""
    if optimizer.state:
        return 0
    nbytes = 0
    for settings in optimizer.param_groups:
        moments = _MOMENTS.get(type(optimizer).__name__, 2)
        if type(optimizer).__name__ == "SGD":
            moments = int(bool(settings.get("momentum")))
        moments += int(bool(settings.get("amsgrad")))
        for parameter in settings[PARAMETERS]:
            local = getattr(parameter, "_local_tensor", parameter)
            nbytes += moments * local.nbytes if parameter.requires_grad else 0
    return nbytes


# -- loading --------------------------------------------------------------------------------


def tensor_states(names: Iterable[str], prefix: str) -> dict[str, dict[str, str]]:
    """By parameter name, {state key: stored name}, of the optimizer stored under ``prefix``."""
    start = f"{prefix}.state."
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if name.startswith(start):
            key, _, parameter = name[len(start) :].partition(".")
            found.setdefault(parameter, {})[str(unescape(key))] = name
    return found


def fill_optimizer(
    optimizer: torch.optim.Optimizer, node: OptimizerNode, name: str, path: tuple[Component, ...], loading: Loading
) -> None:
    """Have ``optimizer`` hold exactly what the stored ``node`` does, matched by the names of its parameters."""
    _refuse_hidden_state(optimizer, name)
    group_of = {stored: index for index, group in enumerate(node.groups) for stored in group[PARAMETERS]}
    states = tensor_states(loading.tensor_names(), node.prefix)
    matched: set[str] = set()
    for index, group in enumerate(optimizer.param_groups):
        parameters: list[tuple[torch.Tensor, str]] = []
        for position, parameter in enumerate(group[PARAMETERS]):
            names = _names(parameter, group, position, index, name, loading)
            stored = _stored_name(names, group_of, loading)
            if stored is None:
                loading.target.missing.append(f"{name}.{PARAMETERS}.{names[0]}")
            else:
                parameters.append((parameter, stored))
                matched.update((stored, *(other for other in names if other in group_of)))
        sources = [group_of[stored] for _, stored in parameters]
        settings = _fill_settings(group, index, sources, node, name, path, loading)
        for parameter, stored in parameters:
            if id(parameter) in loading.unfilled:
                continue  # its shape differs, and so would that of its moments
            _fill_state(optimizer, parameter, stored, settings, states.get(stored, {}), node, path, loading)
    loading.target.unexpected += [f"{name}.{PARAMETERS}.{stored}" for stored in group_of if stored not in matched]
    own = {key: loading.build(tree, (*path, "nested", key)) for key, tree in node.state.get(NO_PARAMETER, {}).items()}
    loading.target.later(Order.OPTIMIZERS, lambda: _settle(optimizer, own))


def _names(
    parameter: torch.Tensor, group: dict[str, Any], position: int, index: int, name: str, loading: Loading
) -> list[str]:
    known = loading.names.get(id(parameter))
    if known:
        return known
    own_names = group.get(NAMES)
    if own_names:
        return [escaped_key(own_names[position])]
    raise UnsupportedValueError(_nameless(name, parameter, position, index))


def _stored_name(names: list[str], group_of: dict[str, int], loading: Loading) -> str | None:
    """Which of a parameter's names the stored optimizer knows it by; tied ones resolve through the step's aliases."""
    for name in names:
        if name in group_of:
            return name
    for name in names:
        alias = loading.aliases.get(name)
        if alias in group_of:
            return alias
    return None


def _fill_settings(
    group: dict[str, Any],
    index: int,
    stored_groups: list[int],
    node: OptimizerNode,
    name: str,
    path: tuple[Component, ...],
    loading: Loading,
) -> dict[str, Any]:
    """The settings that ``group`` will have: those of the stored group of its parameters."""
    sources = sorted(set(stored_groups))
    if not sources and index < len(node.groups) and not node.groups[index][PARAMETERS] and not group[PARAMETERS]:
        sources = [index]  # a group that is empty on both sides
    if not sources:
        return group
    saved = {key: value for key, value in node.groups[sources[0]].items() if key != PARAMETERS}
    for other in sources[1:]:
        if saved != {key: value for key, value in node.groups[other].items() if key != PARAMETERS}:
            loading.mismatch(
                f"{name}.param_groups[{index}]",
                f"parameters of the groups {', '.join(map(str, sources))}, whose settings differ,",
                "in one group",
            )
            return group
    settings = {}
    for key, tree in saved.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(tree, TensorRef) and _alike(current, tree.name, loading):
            settings[key] = loading.fill(current, tree.name, f"{name}.param_groups[{index}].{key}")
        else:
            settings[key] = loading.build(tree, (*path, "groups", str(index), key), like=current)
    loading.target.later(Order.OPTIMIZERS, lambda: group.update(settings))
    return group | settings


def _alike(tensor: torch.Tensor, source: str, loading: Loading) -> bool:
    stored = loading.stored(source)
    return stored == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), "tensor")


def _fill_state(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    stored_parameter: str,
    settings: dict[str, Any],
    sources: dict[str, str],
    node: OptimizerNode,
    path: tuple[Component, ...],
    loading: Loading,
) -> None:
    current: dict[Any, Any] = optimizer.state.get(parameter, {})
    state: dict[Any, Any] = {}
    for key, source in sources.items():
        on_mesh, device = is_dtensor(parameter), real_device(parameter)
        stored = loading.stored(source)
        if key == "step" or (not stored.shape and parameter.shape):
            on_mesh = False  # counters and factors are plain numbers beside sharded moments
        if key == "step" and not (settings.get("capturable") or settings.get("fused")):
            device = torch.device("cpu")
        dtype = _state_dtype(parameter, stored_parameter, stored.dtype, loading)
        tensor = current.get(key)
        if (
            isinstance(tensor, torch.Tensor)
            and (tuple(tensor.shape), tensor.dtype, is_dtensor(tensor)) == (stored.shape, dtype, on_mesh)
            and real_device(tensor) == device
        ):
            state[key] = loading.fill(tensor, source, source)
        elif on_mesh:
            state[key] = loading.new(source, like=parameter, dtype=dtype, on_mesh=True)
        else:
            state[key] = loading.new(source, dtype=dtype, device=device)
    for key, tree in node.state.get(stored_parameter, {}).items():
        nested = (*path, "nested", key, stored_parameter)
        state[key] = loading.build(tree, nested, like=current.get(key), device=real_device(parameter))

    def settle() -> None:
        if not state:
            optimizer.state.pop(parameter, None)
            return
        kept = optimizer.state.setdefault(parameter, {})
        kept.clear()
        kept.update(state)

    loading.target.later(Order.OPTIMIZERS, settle)


def _state_dtype(parameter: torch.Tensor, stored_parameter: str, dtype: str, loading: Loading) -> torch.dtype:
    """The stored dtype; with ``cast``, moments that had their parameter's dtype have its new one."""
    found = dtype_of(dtype)
    source = loading.resolve(stored_parameter)
    follows = source is not None and loading.stored(source).dtype == dtype
    return parameter.dtype if loading.cast and follows and parameter.is_floating_point() else found


def _settle(optimizer: torch.optim.Optimizer, own: dict[Any, Any]) -> None:
    for key, value in own.items():
        optimizer.state[key] = value
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
