"""One tensor or array at a time: what it is on all ranks, what of it lies here, and a new one like it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ckpt.errors import BadInputError, UnsupportedValueError
from ckpt.format.layout import Mesh, nesting
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.plan.boxes import Box, local_box, whole_box
from ckpt.plan.save import LocalTensor
from ckpt.state.records import TensorLeaf

SPECS_LIMIT = 100_000  # remembered; a state that makes new DTensors for every save must not fill the memory with theirs
PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_NBYTES if hasattr(torch, name)}


class Grid(NamedTuple):
    """A mesh of ranks and, per mesh dimension, a placement word."""

    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    placements: tuple[str, ...]


class View(msgspec.Struct, frozen=True, eq=False):
    """A tensor taken apart: this rank's ``local`` part (detached) and what is true on all ranks."""

    local: torch.Tensor
    dtype: str
    shape: tuple[int, ...]  # global
    grid: Grid | None  # None: a plain tensor


class _Known(NamedTuple):
    """All that ``what`` of a name depends on, as it was when the tensor was last looked at."""

    type: type[torch.Tensor]
    spec: Any  # of a DTensor; held, so that no other spec can have its identity
    dtype: torch.dtype
    local_shape: torch.Size
    what: LocalTensor


class Inspector:
    """Takes tensors apart and refuses, by name, those that have no plain bytes.

    Kept from save to save it looks at what has not changed only once. It holds no tensor between walks.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._known: dict[str, _Known] = {}
        self._rows: dict[str, tuple[tuple[Any, ...], tuple[str, ...], tuple[_Known, ...]]] = {}
        # By identity, since hashing meshes and placements is slow; the spec is held, so that no identity is used twice.
        self._grid_of_spec: dict[int, tuple[Any, Grid]] = {}
        self._grids: dict[tuple[int, Any, Any], Grid] = {}
        self._boxes: dict[tuple[Grid, tuple[int, ...]], Box] = {}
        self._sizes: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}  # by a grid's identity

    def part(
        self, tensor: torch.Tensor, name: str, group: str, kind: str, *, first_rank_owns: bool
    ) -> tuple[torch.Tensor, LocalTensor]:
        """This rank's part of ``tensor`` (detached, live) and what it is on all ranks: the same object while it is so.

        Raises UnsupportedValueError as ``view`` does.
        """
        known = self._known.get(name)
        if known is not None and type(tensor) is known[0]:  # the way of nearly every tensor of nearly every save
            _, spec, dtype, local_shape, what = known
            local = tensor if spec is None else tensor._local_tensor  # type: ignore[attr-defined]
            if (
                (spec is None or (tensor._spec is spec and type(local) in PLAIN_TYPES))  # type: ignore[attr-defined]
                and local.dtype is dtype
                and not local.is_nested
                and local.layout is torch.strided
                and local.shape == local_shape
                and what.group == group
                and what.kind == kind
                and what.first_rank_owns == first_rank_owns
            ):
                return (local.detach() if local.requires_grad else local), what
        view = self.view(tensor, name)
        shape, ranks, placements = view.grid or (None, None, ())
        what = LocalTensor(name, group, view.dtype, view.shape, shape, ranks, placements, kind, first_rank_owns)
        spec = tensor._spec if view.grid is not None else None  # type: ignore[attr-defined]
        self._known[name] = _Known(type(tensor), spec, view.local.dtype, view.local.shape, what)
        return view.local, what

    def remember(self, row: str, keys: Iterable[Any], names: Sequence[str]) -> None:
        """Keep together what was found of the tensors ``names``, the values of a dict with these ``keys``."""
        found = [self._known[name] for name in names if name in self._known]
        if len(found) == len(names):  # else all was forgotten in between
            self._rows[row] = tuple(keys), tuple(names), tuple(found)

    def again(self, row: str, tensors: Mapping[Any, torch.Tensor], *, trusted: bool) -> list[TensorLeaf] | None:
        """The leaves of a dict of tensors that is in all as it was when remembered; None when anything else must look.

        Made for the hundreds of small dicts of an optimizer's state, with little for each tensor.
        """
        remembered = self._rows.get(row)
        if remembered is None or tuple(tensors) != remembered[0]:
            return None
        leaves = []
        for tensor, (kind, spec, dtype, local_shape, what) in zip(tensors.values(), remembered[2], strict=True):
            local = tensor
            if type(tensor) is not kind:
                return None
            if spec is not None:
                local = tensor._local_tensor  # type: ignore[attr-defined]
                if tensor._spec is not spec or type(local) not in PLAIN_TYPES:  # type: ignore[attr-defined]
                    return None
            if (
                local.dtype is not dtype
                or local.shape != local_shape
                or local.layout is not torch.strided
                or local.requires_grad
                or local.is_nested
                or local.is_meta
                or local.is_conj()
                or local.is_neg()
            ):
                return None
            leaves.append(TensorLeaf(what, local, trusted or spec is not None))
        return leaves

    def names(self, row: str) -> tuple[str, ...]:
        """The names of the tensors of a remembered dict."""
        return self._rows[row][1]

    def view(self, tensor: torch.Tensor, name: str) -> View:
        """``tensor`` taken apart; UnsupportedValueError naming it when its bytes are not all there is to it."""
        local, grid = tensor, None
        if type(tensor) not in PLAIN_TYPES:
            if is_dtensor(tensor):
                local, grid = self._local(tensor, name)
            else:
                _refuse_subclass(tensor, name)
        if local.layout is not torch.strided or local.is_quantized or local.is_nested:
            _refuse_form(local, name)
        dtype = _DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedValueError(f"{name}: dtype {str(tensor.dtype).removeprefix('torch.')} cannot be stored")
        return View(local.detach() if local.requires_grad else local, dtype, tuple(tensor.shape), grid)

    def _local(self, tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Grid]:
        """A DTensor's local part, checked against the arithmetic, and its grid."""
        # The public to_local(), placements and device_mesh cost some 25 us a tensor.
        spec, local, shape = tensor._spec, tensor._local_tensor, tuple(tensor.shape)  # type: ignore[attr-defined]
        held = self._grid_of_spec.get(id(spec))
        if held is None:
            if len(self._grid_of_spec) >= SPECS_LIMIT:
                self._forget()
            held = self._grid_of_spec[id(spec)] = spec, self._grid(spec, name)
        grid = held[1]
        if type(local) not in PLAIN_TYPES:
            local = _waited(local, name)
        sizes = self._sizes.get((id(grid), shape))
        if sizes is None:
            outside = self.rank not in grid.mesh_ranks
            sizes = self._sizes[id(grid), shape] = tuple(local.shape) if outside else self.box(grid, shape).sizes
        if local.shape != sizes:
            raise UnsupportedValueError(
                f"{name}: rank {self.rank} holds a shard of shape {tuple(local.shape)}, but {list(grid.placements)} "
                f"on a mesh of {list(grid.mesh_shape)} gives it {sizes} of {shape}; shard it with "
                "distribute_tensor or fully_shard, which cut evenly"
            )
        return local, grid

    def _forget(self) -> None:
        for memory in (self._known, self._rows, self._grid_of_spec, self._grids, self._boxes, self._sizes):
            memory.clear()

    def box(self, grid: Grid | None, shape: tuple[int, ...]) -> Box:
        """The box that this rank holds of a tensor of global ``shape``: all of it when there is no grid."""
        if grid is None:
            return whole_box(shape)
        box = self._boxes.get((grid, shape))
        if box is None:
            if self.rank in grid.mesh_ranks:
                box = local_box(Mesh(grid.mesh_shape, grid.mesh_ranks), grid.placements, shape, self.rank)
            else:
                box = Box((0,) * len(shape), (0,) * len(shape))
            self._boxes[grid, shape] = box
        return box

    def _grid(self, spec: Any, name: str) -> Grid:
        key = (id(spec.mesh), spec.placements, getattr(spec, "shard_order", None))
        grid = self._grids.get(key)
        if grid is None:
            mesh = spec.mesh.mesh
            shape = tuple(mesh.shape)
            grid = self._grids[key] = Grid(shape, tuple(mesh.flatten().tolist()), _words(spec, shape, name))
        return grid


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor; without importing what only they need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_ndarray(value: Any) -> bool:
    """Whether ``value`` is a numpy array; without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def array_tensor(array: Any, name: str) -> torch.Tensor:
    """A tensor with the array's elements: sharing its memory where it can, else a copy (read-only, byte-swapped).

    UnsupportedValueError naming it for arrays that are more than numbers: objects, text, dates,
    structures, masks, and dtypes that torch has not.
    """
    numpy = sys.modules["numpy"]
    if type(array) not in (numpy.ndarray, numpy.memmap):
        raise UnsupportedValueError(
            f"{name}: a {type(array).__module__}.{type(array).__qualname__}; only plain numpy arrays can be stored, "
            "use numpy.asarray(...) and store what that loses apart"
        )
    if array.dtype.kind not in "biufc" or f"{array.dtype.name}" not in DTYPE_NBYTES:
        raise UnsupportedValueError(
            f"{name}: a numpy array of dtype {array.dtype}; only numbers and booleans that torch has too can be "
            "stored, use .tolist() or an array of numbers"
        )
    plain = numpy.asarray(array)
    if not plain.dtype.isnative:
        plain = plain.astype(plain.dtype.newbyteorder("="))
    if not plain.flags.writeable or any(stride < 0 or stride % plain.itemsize for stride in plain.strides):
        plain = plain.copy()
    return torch.from_numpy(plain)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a layout's dtype name; BadInputError when this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInputError(f"dtype {name}: torch {torch.__version__} has no such dtype; use the version that wrote it")
    return dtype


@functools.cache
def castable(stored: str, wanted: str) -> bool:
    """Whether torch converts one dtype to the other; not so packed ones and those of less than a byte."""
    try:
        torch.empty(1, dtype=dtype_of(stored)).to(dtype_of(wanted))
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def new_dtensor(local: torch.Tensor, like: Any, shape: Sequence[int]) -> torch.Tensor:
    """A DTensor around ``local`` on the mesh of DTensor ``like``: placed as it when of its shape, else replicated."""
    from torch.distributed.tensor import DTensor, Replicate

    spec = like._spec
    alike = tuple(shape) == tuple(like.shape)
    if alike and local.dtype == like.dtype:
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call] # torch has it so
    return DTensor.from_local(
        local,
        spec.mesh,
        spec.placements if alike else [Replicate()] * spec.mesh.ndim,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(prod(shape[i + 1 :]) for i in range(len(shape))),
    )


def real_device(tensor: torch.Tensor) -> torch.device:
    """Where the tensor lives; for a meta tensor, where it should: its mesh's device, else the CPU."""
    if tensor.device.type != "meta":
        return tensor.device
    if is_dtensor(tensor):
        kind: str = tensor._spec.mesh.device_type  # type: ignore[attr-defined]
        if kind != "cpu":
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def fillable(tensor: torch.Tensor) -> bool:
    """Whether bytes can be put into the (local) tensor as it is: real, no element twice, no pending conj or neg."""
    if tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or not _may_overlap(tensor)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """False when each dimension steps over all that the ones of smaller stride span: then no element lies twice."""
    span = 1  # elements from the first to the last of the dimensions so far, both included
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def _refuse_form(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_nested:
        raise UnsupportedValueError(f"{name}: a nested tensor; store its values() and offsets()")
    if tensor.is_quantized:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UnsupportedValueError(
            f"{name}: a quantized tensor of dtype {dtype}; store its int_repr() with scales and zero points"
        )
    raise UnsupportedValueError(f"{name}: a {tensor.layout} tensor; store .to_dense(), or its indices and values")


def _refuse_subclass(tensor: torch.Tensor, name: str) -> None:
    kind = type(tensor)
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise UnsupportedValueError(f"{name}: not initialized yet; run one forward pass before the state is used")
    dispatches = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if dispatches or _function(kind) not in _PLAIN_FUNCTIONS or getattr(tensor, "__dict__", None):
        raise UnsupportedValueError(
            f"{name}: a tensor of class {kind.__module__}.{kind.__qualname__}, which may hold more than its numbers; "
            "store the plain tensors that it is made of"
        )


def _function(kind: type) -> Any:
    override = kind.__torch_function__  # type: ignore[attr-defined]
    return getattr(override, "__func__", override)


_PLAIN_FUNCTIONS = {_function(torch.Tensor), _function(torch.nn.Parameter)}


def _waited(local: torch.Tensor, name: str) -> torch.Tensor:
    """The plain local tensor behind one that a collective is still filling."""
    wait = getattr(local, "wait", None)
    if callable(wait):
        waited: torch.Tensor = wait()
        return waited
    _refuse_subclass(local, name)
    return local


def _reordered(spec: Any) -> bool:
    """Whether plain shards nest in another order than from left to right (torch keeps that beside the placements)."""
    order = getattr(spec, "shard_order", None) or ()
    return any(tuple(sorted(entry.mesh_dims)) != tuple(entry.mesh_dims) for entry in order)


def _words(spec: Any, mesh_shape: tuple[int, ...], name: str) -> tuple[str, ...]:
    """The placements as the layout's words: ``R``, ``S0``, ``S0/4``."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = spec.placements
    if _reordered(spec):
        placements = type(spec)._convert_shard_order_to_StridedShard(spec.shard_order, placements, spec.mesh)
    words: list[str] = []
    for placement in placements:
        if isinstance(placement, Replicate):
            words.append("R")
        elif isinstance(placement, _StridedShard):
            words.append(f"S{placement.dim}/{placement.split_factor}")
        elif isinstance(placement, Shard):
            words.append(f"S{placement.dim}")
        else:
            raise UnsupportedValueError(
                f"{name}: a DTensor with placement {placement}, whose value is a sum still to be made; "
                "redistribute it to Shard or Replicate first"
            )
    result = tuple(words)
    _check_strides(result, mesh_shape, name)
    return result


def _check_strides(words: tuple[str, ...], mesh_shape: tuple[int, ...], name: str) -> None:
    """Refuse strided shards that are not one box: their split must be the shards nested outside to their right."""
    if nesting(mesh_shape, words) is None:
        raise UnsupportedValueError(
            f"{name}: placements {list(words)} on a mesh of {list(mesh_shape)} leave each rank rows that are not "
            "one block; redistribute it to Shard first"
        )
