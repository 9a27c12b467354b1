"""A step back into a state: all that does not fit is found first, bytes are read next, and values are set last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from ckpt.errors import BadInputError, CkptError, DamagedError
from ckpt.format.names import Component, join_name
from ckpt.format.values import ModuleNode, OptimizerNode, RankRef, TensorRef
from ckpt.plan.boxes import whole_box
from ckpt.state.kinds import (
    DICTS,
    LISTS,
    Order,
    check_state,
    holds_live,
    is_object,
    rebuilt,
    replace_items,
    stored_names,
)
from ckpt.state.model import fill_module
from ckpt.state.optimizer import fill_optimizer
from ckpt.state.records import Mismatch, PerRank, Read, StoredState, StoredTensor, describe
from ckpt.state.rng import RNG
from ckpt.state.target import LoadTarget
from ckpt.state.tensors import (
    Inspector,
    array_tensor,
    castable,
    dtype_of,
    fillable,
    is_dtensor,
    is_ndarray,
    new_dtensor,
    real_device,
)

Path = tuple[Component, ...]


def wanted(
    state: Mapping[str, Any], stored: StoredState, *, rank: int, world: int, strict: bool = True, cast: bool = False
) -> LoadTarget:
    """What a load of ``stored`` into ``state`` reads and does on this rank. Local; changes nothing.

    ``strict`` raises a MismatchError that lists every misfit. Ranks that hold different modules (pipeline
    stages) each find the others' tensors unexpected: pass ``strict=False`` there, keep only what
    is unexpected on all of them, and call ``refuse_misfits``. ``cast`` converts dtypes that differ.

    Raises BadInputError for what cannot be loaded at all: a value of each rank at another world size whose
    object has no ``load_state_dicts``, plain values into a mapping that is read-only.
    """
    check_state(state)
    loading = Loading(stored, rank=rank, world=world, cast=cast)
    target = loading.target
    replaced: dict[str, Any] = {}
    for key, template in state.items():
        if key not in stored.values:
            target.missing.append(join_name((key,)))
            continue
        value = loading.walk(template, stored.values[key], (key,))
        if value is not template:
            replaced[key] = value
    target.ignored += [key for key in stored.values if key not in state]
    loading.finish()
    if strict:
        target.refuse_misfits()
    if replaced:
        if not isinstance(state, MutableMapping):
            raise BadInputError(
                f"state: a read-only {type(state).__qualname__}, but {', '.join(map(repr, replaced))} cannot be filled "
                "in place; pass a dict"
            )
        target.later(Order.VALUES, lambda: state.update(replaced))
    return target


class Loading:
    """One walk over a state and a stored state, side by side."""

    def __init__(self, stored: StoredState, *, rank: int, world: int, cast: bool) -> None:
        self.target = LoadTarget()
        self.rank = rank
        self.world = world
        self.cast = cast
        self.names: dict[int, list[str]] = {}  # id of a parameter or tensor of the state -> all its names
        self.unfilled: set[int] = set()  # ids of parameters that the step has no fitting tensor for
        self.aliases: Mapping[str, str] = stored.aliases
        self.inspector = Inspector(rank)
        self._stored = stored
        self._tensors: Mapping[str, Any] = stored.tensors
        self._from_rank: int | None = None
        self._optimizers: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Look at the optimizers, now that every parameter has its name."""
        for optimizer in self._optimizers:
            optimizer()

    # -- stored tensors ---------------------------------------------------------------------

    def stored(self, name: str) -> StoredTensor:
        """What the step says of a tensor of its own (no alias). DamagedError for one that is not there."""
        found = self._tensors.get(name)
        if found is None:
            raise DamagedError(f"a value stands for the tensor {name[:200]!r}, which the step does not have")
        return StoredTensor(*found)

    def resolve(self, name: str) -> str | None:
        """The name under which the step holds the tensor, itself or through an alias; None when it has none."""
        return name if name in self._tensors else self.aliases.get(name)

    def tensor_names(self) -> Iterable[str]:
        """Every tensor of the step by its own name."""
        return self._tensors

    def names_under(self, prefix: str) -> list[str]:
        """Every name in the step, aliases included, that starts with ``prefix`` and a dot."""
        start = f"{prefix}."
        return [name for names in (self._tensors, self.aliases) for name in names if name.startswith(start)]

    def fill(self, tensor: torch.Tensor, source: str, name: str) -> torch.Tensor | None:
        """Have the state's ``tensor`` filled from the stored ``source``.

        Gives the tensor that will hold the values: itself, or a new one like it when it cannot be written
        to (on the meta device, elements that share memory). None, and a mismatch noted, when they do not fit.
        """
        stored, view = self.stored(source), self.inspector.view(tensor, name)
        fits = stored.dtype == view.dtype or (self.cast and castable(stored.dtype, view.dtype))
        if stored.kind != "tensor" or stored.shape != view.shape or not fits:
            self.mismatch(name, describe(*stored), describe(view.dtype, view.shape))
            return None
        dest = view.local
        if not fillable(dest):
            dest = torch.empty(dest.shape, dtype=tensor.dtype, device=real_device(tensor))
            tensor = dest if view.grid is None else new_dtensor(dest, tensor, view.shape)
        self._read(source, self.inspector.box(view.grid, view.shape), dest)
        return tensor

    def new(
        self,
        source: str,
        *,
        like: Any = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        on_mesh: bool = False,
    ) -> Any:
        """A new tensor (or array) for the stored ``source``: where ``like`` is when of its shape, else on ``device``.

        With ``on_mesh`` it is a DTensor on the mesh of ``like``, replicated when of another shape.
        """
        stored = self.stored(source)
        dtype = dtype or dtype_of(stored.dtype)
        if stored.kind == "ndarray":
            plain = torch.empty(stored.shape, dtype=dtype)
            self._read(source, whole_box(stored.shape), plain)
            return plain.numpy()
        alike = isinstance(like, torch.Tensor) and tuple(like.shape) == tuple(stored.shape)
        if is_dtensor(like) and (alike or on_mesh):
            view = self.inspector.view(like, source)
            box = self.inspector.box(view.grid, stored.shape) if alike else whole_box(stored.shape)
            local = torch.empty(box.sizes, dtype=dtype, device=real_device(like))
            self._read(source, box, local)
            return new_dtensor(local, like, stored.shape)
        place = real_device(like) if alike and device is None else device
        tensor = torch.empty(stored.shape, dtype=dtype, device=place)
        self._read(source, whole_box(stored.shape), tensor)
        return tensor

    def mismatch(self, name: str, stored: str, wanted_: str) -> None:
        """Note that ``name`` does not fit."""
        self.target.mismatched.append(Mismatch(name, stored, wanted_))

    def _read(self, source: str, box: Any, dest: torch.Tensor) -> None:
        if box.numel:
            self.target.reads.append(Read(source, box, dest, self.stored(source).dtype, self._from_rank))

    # -- trees ------------------------------------------------------------------------------

    def build(self, node: Any, path: Path, *, like: Any = None, device: torch.device | None = None) -> Any:
        """A new value for a stored tree; tensors go where ``like`` has one of the same shape, else to ``device``."""
        if isinstance(node, TensorRef):
            return self.new(node.name, like=like, device=device)
        if type(node) in DICTS:
            likes = like if type(like) in DICTS else {}
            return rebuilt(
                node,
                [
                    (key, self.build(item, (*path, key), like=likes.get(key), device=device))
                    for key, item in node.items()
                ],
            )
        if type(node) in LISTS:
            peers = like if type(like) in LISTS and len(like) == len(node) else [None] * len(node)
            return rebuilt(
                node,
                [
                    self.build(item, (*path, str(i)), like=peer, device=device)
                    for i, (item, peer) in enumerate(zip(node, peers, strict=True))
                ],
            )
        if isinstance(node, (ModuleNode, OptimizerNode)):
            kind = "a module" if isinstance(node, ModuleNode) else "an optimizer"
            self.mismatch(join_name(path), kind, "a plain value")
            return like
        if isinstance(node, RankRef):
            with self._own_rank(node, path) as tree:
                return self.build(tree, path, like=like, device=device)
        return node

    def walk(self, template: Any, node: Any, path: Path) -> Any:
        """What stands in the place of ``template`` after the load: itself, filled or to be filled, or a new value."""
        if isinstance(node, RankRef) or isinstance(template, PerRank):
            return self._walk_rank(template, node, path)
        if isinstance(template, nn.Module):
            if self._is(node, ModuleNode, "a module", path):
                fill_module(template, node, join_name(path), self)
            return template
        if isinstance(template, torch.optim.Optimizer):
            if self._is(node, OptimizerNode, "an optimizer", path):
                self._later_optimizer(template, node, path)
            return template
        if is_object(template):
            if isinstance(node, (ModuleNode, OptimizerNode)):
                self._is(node, type(None), f"a {type(template).__qualname__}", path)
            else:
                self._walk_object(template, node, path)
            return template
        if isinstance(template, torch.Tensor):
            return self._walk_tensor(template, node, path)
        if is_ndarray(template):
            return self._walk_array(template, node, path)
        if type(template) in DICTS and type(node) in DICTS:
            return self._walk_dict(template, node, path)
        if type(template) in LISTS and type(node) in LISTS:
            return self._walk_list(template, node, path)
        if holds_live(template):
            self.mismatch(join_name(path), _kind_of(node), f"a {type(template).__name__} with tensors or objects")
            return template
        return self.build(node, path, like=template)

    def _walk_tensor(self, template: torch.Tensor, node: Any, path: Path) -> Any:
        name = join_name(path)
        self.names.setdefault(id(template), []).append(name)
        if not isinstance(node, TensorRef):
            self.mismatch(name, _kind_of(node), "a tensor")
            return template
        filled = self.fill(template, node.name, name)
        if filled is None:
            self.unfilled.add(id(template))
            return template
        if filled is not template and isinstance(template, nn.Parameter):
            return nn.Parameter(filled, requires_grad=template.requires_grad)
        return filled

    def _walk_array(self, template: Any, node: Any, path: Path) -> Any:
        name = join_name(path)
        if not isinstance(node, TensorRef):
            self.mismatch(name, _kind_of(node), "an array")
            return template
        stored = self.stored(node.name)
        wanted_dtype = template.dtype.name
        fits = stored.kind == "ndarray" and stored.shape == template.shape
        if not fits or (stored.dtype != wanted_dtype and not self.cast):
            self.mismatch(name, describe(*stored), describe(wanted_dtype, template.shape, "ndarray"))
            return template
        dtype = dtype_of(wanted_dtype)
        if not template.flags.writeable or not template.dtype.isnative:
            return self.new(node.name, dtype=dtype)  # a plain one takes its place
        if template.flags.c_contiguous:
            self._read(node.name, whole_box(stored.shape), array_tensor(template, name))
        else:
            new = self.new(node.name, dtype=dtype)
            self.target.later(Order.TENSORS, lambda: template.__setitem__(..., new))
        return template

    def _walk_dict(self, template: Any, node: Any, path: Path) -> Any:
        items: list[tuple[Any, Any]] = []
        for key, item in node.items():
            if key in template:
                items.append((key, self.walk(template[key], item, (*path, key))))
            elif template and stored_names(item):
                self.target.unexpected += stored_names(item)
            else:
                items.append((key, self.build(item, (*path, key))))
        for key, item in template.items():
            if key not in node and holds_live(item):
                self.target.missing.append(join_name((*path, key)))
                items.append((key, item))
        return self._settle(template, rebuilt(node, items))

    def _walk_list(self, template: Any, node: Any, path: Path) -> Any:
        items: list[Any] = []
        for index, item in enumerate(node):
            if index < len(template):
                items.append(self.walk(template[index], item, (*path, str(index))))
            elif isinstance(item, (ModuleNode, OptimizerNode)):
                self.target.unexpected.append(item.prefix)
            else:
                items.append(self.build(item, (*path, str(index))))
        for index in range(len(node), len(template)):
            # A list of plain values or tensors has the saved length; a module cannot be left out.
            if holds_live(template[index], tensors=False):
                self.target.missing.append(join_name((*path, str(index))))
                items.append(template[index])
        return self._settle(template, rebuilt(node, items))

    def _settle(self, template: Any, new: Any) -> Any:
        """``template`` itself, to be given the items of ``new``, when it can hold them and is of the saved type."""
        if type(template) is not type(new) or type(new) not in (*DICTS, list):
            return new
        self.target.later(Order.VALUES, lambda: replace_items(template, new))
        return template

    def _walk_object(self, template: Any, node: Any, path: Path) -> None:
        # Asked only when needed: the state_dict() of some loaders starts their workers.
        like = template.state_dict() if stored_names(node) else None
        tree = self.build(node, path, like=like)
        self._load_object(template, lambda: template.load_state_dict(tree), path)

    def _load_object(self, template: Any, act: Callable[[], Any], path: Path) -> None:
        def load() -> None:
            try:
                act()
            except CkptError:
                raise
            except Exception as error:
                raise BadInputError(
                    f"{join_name(path)}: {type(template).__qualname__} refused the stored state "
                    f"({type(error).__name__}: {error})"
                ) from error

        self.target.later(Order.GENERATORS if isinstance(template, RNG) else Order.OBJECTS, load)

    def _later_optimizer(self, optimizer: torch.optim.Optimizer, node: OptimizerNode, path: Path) -> None:
        tensors, aliases, from_rank = self._tensors, self.aliases, self._from_rank

        def look() -> None:
            self._tensors, self.aliases, self._from_rank = tensors, aliases, from_rank
            fill_optimizer(optimizer, node, join_name(path), path, self)

        self._optimizers.append(look)

    def _is(self, node: Any, kind: type, wanted_: str, path: Path) -> bool:
        if isinstance(node, kind):
            return True
        self.mismatch(join_name(path), _kind_of(node), wanted_)
        return False

    # -- values of each rank ----------------------------------------------------------------

    def _walk_rank(self, template: Any, node: Any, path: Path) -> Any:
        inner = template.value if isinstance(template, PerRank) else template
        if isinstance(node, RankRef) and self._stored.rank_values is None:
            self._walk_other_world(inner, node, path)
            return template
        if isinstance(node, RankRef) and node.key not in (self._stored.rank_values or {}):
            self.target.missing.append(join_name(path))
            return template
        if isinstance(node, RankRef):
            with self._own_rank(node, path) as tree:
                value = self.walk(inner, tree, path)
        else:
            value = self.walk(inner, node, path)  # saved as the same on all ranks
        if not isinstance(template, PerRank):
            return value
        if value is not inner:
            self.target.later(Order.VALUES, lambda: setattr(template, "value", value))
        return template

    def _walk_other_world(self, inner: Any, node: RankRef, path: Path) -> None:
        everyone = self._stored.all_rank_values or ()
        load = getattr(inner, "load_state_dicts", None)
        if not callable(load):
            raise BadInputError(
                f"{join_name(path)}: each of {len(everyone)} ranks saved its own, and this job has {self.world}; give "
                "its object a load_state_dicts(states) method, or leave the key out of the state to start it anew"
            )
        trees = []
        for rank, values in enumerate(everyone):
            if node.key in values:
                with self._source(rank):
                    trees.append(self.build(values[node.key], path))
        if isinstance(inner, RNG):
            self._load_object(inner, lambda: load(trees, rank=self.rank, world=self.world), path)
        else:
            self._load_object(inner, lambda: load(trees), path)

    @contextlib.contextmanager
    def _own_rank(self, node: RankRef, path: Path) -> Iterator[Any]:
        """This rank's own saved tree, while its tensors are the ones that names mean."""
        if self._stored.rank_values is None:
            everyone = self._stored.all_rank_values or ()
            raise BadInputError(
                f"{join_name(path)}: each of {len(everyone)} ranks saved its own, and this job has {self.world}; leave "
                "the key out of the state to start it anew"
            )
        with self._source(self.rank):
            yield self._stored.rank_values.get(node.key)

    @contextlib.contextmanager
    def _source(self, rank: int) -> Iterator[None]:
        if self._from_rank is not None:
            raise DamagedError(f"a value of rank {rank}'s own stands for another such value, without end")
        everyone = self._stored.all_rank_tensors
        tensors = self._stored.rank_tensors if self._stored.rank_values is not None else (everyone or {rank: {}})[rank]
        before = self._tensors, self.aliases, self._from_rank
        self._tensors, self.aliases, self._from_rank = tensors, {}, rank
        try:
            yield
        finally:
            self._tensors, self.aliases, self._from_rank = before


def _kind_of(node: Any) -> str:
    if isinstance(node, TensorRef):
        return "a tensor"
    if isinstance(node, ModuleNode):
        return "a module"
    if isinstance(node, OptimizerNode):
        return "an optimizer"
    return f"a {type(node).__name__}"
