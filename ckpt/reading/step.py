"""Reading the tensors and values of one committed step, without torch: what verify, diff, restore and show stand on.

Every byte that is handed out was digested first. What is not what COMMIT pins, is missing or cannot be read is taken
from where it is right (``ckpt.reading.sources``: tiers, parity) and told by ``repaired``; where nothing has it,
DamagedError names file, tensor, chunk and both digests. Memory is bounded by the caller's own buffer plus one chunk.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt.errors import BadInputError, CkptError, DamagedError, NotFoundError, StoreError
from ckpt.format import records
from ckpt.format.chunk import RAW, decode_chunk
from ckpt.format.commit import Attempt, Commit
from ckpt.format.layout import Layout, Tensor, decode_layout, layout_key
from ckpt.format.part import DataFile, Part, RankTensor
from ckpt.format.safetensors import DTYPE_NBYTES
from ckpt.format.values import decode
from ckpt.plan.boxes import Box, LayoutBoxes, whole_box
from ckpt.plan.files import Entry, file_tables
from ckpt.plan.load import Placed, Shares, share
from ckpt.reading.fetch import Fetch, Landing, bounce
from ckpt.reading.shards import FileShards, check_digest, chunk_text, part_files, shard_digests, wrong_digest
from ckpt.reading.sources import Repaired, Sources, Unopened
from ckpt.reading.spans import chunk_span, header_span
from ckpt.reading.tree import merge_values, without_torch
from ckpt.run import LAYOUT_LIMIT_NBYTES, Run, StepState, as_damage, part_of
from ckpt.store.base import Seen, Source

CACHED_SHARDS = 500_000  # of all ranks together; some 150 bytes each

Advance = Callable[[int], None]  # told the number of bytes just read and verified


class StepReader:
    """One committed step, opened for reading. Cheap to make: layouts and parts are read when first needed.

    Used by one thread at a time, but for ``fetch`` and ``fetch_together``.
    """

    def __init__(self, run: Run, attempt: Attempt, commit: Commit) -> None:
        self.run, self.attempt, self.commit = run, attempt, commit
        self.sources = Sources(run, attempt, commit)
        self._layout_of: dict[int, str] = {}
        for ref in commit.layouts:
            for first, last in ref.ranks:
                for rank in range(max(first, 0), min(last, commit.world - 1) + 1):
                    self._layout_of[rank] = ref.digest
        self._boxes: dict[str, LayoutBoxes] = {}
        self._homes: dict[str, tuple[str, Tensor]] | None = None  # name -> digest of the layout that has its bytes
        self._aliases: dict[str, str] = {}
        self._shares: dict[str, Shares] = {}  # by the digest of a layout
        # Rank -> name -> its shards, one unless replicas are written in pieces.
        self._tables: OrderedDict[int, dict[str, list[tuple[FileShards, Placed]]]] = OrderedDict()
        self._own: dict[int, tuple[RankTensor, ...]] = {}
        self._last_part: Part | None = None
        self._looked_at: set[str] = set()  # data files
        self._cached_shards = 0

    @classmethod
    def open(cls, run: Run, step: int | None = None) -> StepReader:
        """The live step of that number, or the newest. NotFoundError, DamagedError, UnsupportedFormatError."""
        return cls.of(run, run.find(step))

    @classmethod
    def of(cls, run: Run, state: StepState) -> StepReader:
        """The step of a survey's row, which must have a COMMIT."""
        if state.commit is None:
            raise BadInputError(f"{run.url}/{state.attempt.folder}: {state.state}: {state.why}")
        return cls(run, state.attempt, state.commit)

    # -- what there is ---------------------------------------------------------------------

    def where(self, name: str) -> str:
        """A file of this step, for messages."""
        return f"{self.run.url}/{self.run.key(self.attempt, name)}"

    def repaired(self) -> list[Repaired]:
        """What was damaged or missing so far and came from elsewhere."""
        return self.sources.repaired()

    def layout_boxes(self, digest: str) -> LayoutBoxes:
        """The layout of that digest, with its arithmetic."""
        if digest not in self._boxes:
            try:
                layout = self.run.layout(digest)
            except (DamagedError, StoreError) as error:
                layout, _ = self.sources.small(
                    layout_key(digest), lambda raw, _: decode_layout(raw, digest), LAYOUT_LIMIT_NBYTES, error
                )
            most = max((max(mesh.ranks) for mesh in layout.meshes), default=0)
            if most >= self.commit.world:  # before its meshes are laid out rank by rank
                found = f"the layout {digest} has rank {most}"
                raise records.damaged(self.where("COMMIT"), found, f"ranks below {self.commit.world}")
            self._boxes[digest] = LayoutBoxes(layout)
        return self._boxes[digest]

    def _shares_of(self, digest: str) -> Shares:
        if digest not in self._shares:
            self._shares[digest] = Shares(self.layout_boxes(digest))
        return self._shares[digest]

    def rank_layout(self, rank: int) -> str:
        """The digest of the layout of ``rank``."""
        if rank not in self._layout_of:
            raise DamagedError(f"{self.where('COMMIT')}: no layout for rank {rank} of {self.commit.world}")
        return self._layout_of[rank]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, over all layouts, in layout order. Those that only one rank has: ``rank_tensors``."""
        return {name: tensor for name, (_, tensor) in self._all_homes().items()}

    def aliases(self) -> dict[str, str]:
        """Other name -> name, of tied tensors."""
        self._all_homes()
        return self._aliases

    def _all_homes(self) -> dict[str, tuple[str, Tensor]]:
        if self._homes is None:
            homes: dict[str, tuple[str, Tensor]] = {}
            for ref in self.commit.layouts:
                layout = self.layout_boxes(ref.digest).layout
                self._aliases.update(layout.aliases)
                for tensor in layout.tensors:
                    if tensor.name not in homes or (tensor.owners and not homes[tensor.name][1].owners):
                        homes[tensor.name] = (ref.digest, tensor)
            self._homes = homes
        return self._homes

    def layout_of_tensor(self, name: str) -> Layout:
        """The layout whose ranks wrote ``name``; its meshes are the ones that the tensor's ``mesh`` counts in."""
        return self.layout_boxes(self._home(name)[0]).layout

    def _home(self, name: str) -> tuple[str, Tensor]:
        homes = self._all_homes()
        home = homes.get(name) or homes.get(self._aliases.get(name, name))
        if home is None:
            raise NotFoundError(
                f"{self.where('COMMIT')}: no tensor {name!r}; `ckpt show` lists the {len(homes)} there are"
            )
        return home

    def part(self, rank: int) -> Part:
        """Rank ``rank``'s part, checked against COMMIT. Only the last one is kept: parts can be large."""
        if self._last_part is not None and self._last_part.rank == rank:
            return self._last_part
        try:
            part = self.run.part(self.attempt, self.commit, rank)
        except (DamagedError, StoreError) as error:
            ref = self.commit.parts[rank]
            raw, _ = self.sources.pinned(ref, error)
            part = part_of(self.commit, rank, raw, self.where(ref.name))
        if part.layout != self.rank_layout(rank):
            raise DamagedError(
                f"{self.where(self.commit.parts[rank].name)}: names the layout {part.layout}, "
                f"COMMIT says {self.rank_layout(rank)}"
            )
        self._last_part = part
        return part

    def files(self, part: Part) -> list[FileShards]:
        """The data files of a part with their shards."""
        boxes = self.layout_boxes(part.layout)
        tables = file_tables(boxes.layout, part.rank, part.rank_tensors, boxes)
        return part_files(part, tables, self.where(self.commit.parts[part.rank].name))

    def value_ranks(self) -> list[int]:
        """The first rank of each layout: the ones whose parts carry the values."""
        return [min(first for first, _ in ref.ranks) for ref in self.commit.layouts if ref.ranks]

    def value_nodes(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """``(rank, top-level key -> typed JSON)``, one for each layout."""
        for rank in self.value_ranks():
            part = self.part(rank)
            if part.values is None:
                where = self.where(self.commit.parts[rank].name)
                raise DamagedError(f"{where}: has no values, though it is the first rank of its layout")
            yield rank, part.values

    def values(self, *, torch_types: bool = True) -> dict[str, Any]:
        """Top-level key -> tree of values, merged over all layouts.

        Without ``torch_types`` the few values that are torch's own (dtypes, devices, sizes) come
        as text and tuples, and torch is not imported.
        """
        merged: dict[str, Any] = {}
        for rank, nodes in self.value_nodes():
            for key, node in nodes.items():
                where = f"{self.where(self.commit.parts[rank].name)}: {key}"
                tree = decode(node if torch_types else without_torch(node), where)
                merged[key] = merge_values(merged[key], tree, where) if key in merged else tree
        return merged

    def rank_values(self, rank: int, *, torch_types: bool = True) -> dict[str, Any]:
        """What only ``rank`` has: key -> tree."""
        where = self.where(self.commit.parts[rank].name)
        part = self.part(rank)
        self._own[rank] = part.rank_tensors  # they are asked for next, and a part is long
        return {
            key: decode(node if torch_types else without_torch(node), f"{where}: {key}")
            for key, node in part.rank_values.items()
        }

    def rank_tensors(self, rank: int) -> tuple[RankTensor, ...]:
        """The tensors that only ``rank`` has."""
        if rank not in self._own:
            self._own[rank] = self.part(rank).rank_tensors
        return self._own[rank]

    # -- bytes -----------------------------------------------------------------------------

    def read(
        self,
        name: str,
        box: Box | None,
        into: memoryview,
        advance: Advance | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """Fill ``into`` (writable bytes) with ``box`` (None: all) of a tensor, row-major, from whatever files hold it.

        With ``rank`` it is the tensor of that name that only that rank has. DamagedError names
        file, tensor and chunk; ``into`` is then spoiled.
        """
        for fetch in self.fetches(name, box, into, rank=rank):
            self.fetch(fetch)
            if advance is not None:
                advance(fetch.chunk.nbytes)

    def fetches(
        self,
        name: str,
        box: Box | None,
        into: memoryview | Landing,
        *,
        rank: int | None = None,
        shared: bool = False,
    ) -> Iterator[Fetch]:
        """What ``read`` reads, chunk by chunk; to be carried out by ``fetch`` in any order, by any thread.

        ``shared``: other ranks of this node read at the same time, and a tensor that one needs whole, all need.
        Reads layouts and parts, no tensors. When it has been walked to its end, every element of the
        box is in one of the fetches; else it raises DamagedError.
        """
        if rank is None:
            digest, tensor = self._home(name)
            name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
        else:
            own = self._rank_tensor(rank, name)
            dtype, shape = own.dtype, own.shape
        box = box or whole_box(shape)
        shared = shared and rank is None and box == whole_box(shape)
        if isinstance(into, memoryview) and into.nbytes != box.numel * DTYPE_NBYTES[dtype]:
            raise BadInputError(f"{name}{box}: a buffer of {into.nbytes} bytes for {box.numel} elements of {dtype}")
        if not box.numel:
            return
        if rank is not None:
            shares = [share(rank, whole_box(shape), DTYPE_NBYTES[dtype], box)]
        else:
            shares = self._shares_of(digest).of(tensor, box)
        filled, target = 0, into.cast("B") if isinstance(into, memoryview) else into
        for found in shares:
            file, placed = self._placed(found.rank, name, found.piece)
            for cut in found.cuts:
                yield Fetch(file.file, cut.read(found.rank, placed), box, target, shared)
            filled += found.numel
        if filled != box.numel:
            raise DamagedError(
                f"{self.where('COMMIT')}: {name}{box}: the shards in its layouts fill {filled} of {box.numel} elements"
            )

    def open_source(self, file: DataFile, *, shared: bool = False) -> Source:
        """A data file, opened for several reads; ``shared``: other ranks of this node read the same of it.

        One that cannot be opened, or is another file than its part says and found nowhere else, tells so at each read:
        each chunk is then looked for elsewhere.
        """
        key = self.run.key(self.attempt, file.name)
        try:
            with self._pinned(file), contextlib.ExitStack() as unless_right:
                source = unless_right.enter_context(self.run.store.open_source(key, shared=shared))
                if file.name not in self._looked_at:
                    self._look_at(file, key, source)
                unless_right.pop_all()
                return source
        except (DamagedError, StoreError) as error:
            return Unopened(error)

    def _look_at(self, file: DataFile, key: str, source: Source) -> None:
        """What no chunk's digest covers, once: a file of another size or with another header is not this save's."""
        size = self.run.store.size(key)
        if size != file.nbytes:
            self.sources.size(file, DamagedError(f"{self.where(file.name)}: {size} bytes, its part says {file.nbytes}"))
        if file.encoding == RAW:
            header = memoryview(bytearray(file.header_nbytes))
            try:
                source.read_into(0, header)
                check_digest(header, file.header_digest, f"{self.where(file.name)}: header")
            except (DamagedError, StoreError) as error:
                self.sources.span(file.name, header_span(file), error)
        self._looked_at.add(file.name)

    def fetch(self, fetch: Fetch, source: Source | None = None) -> None:
        """Read one chunk, check it, and put its elements where they go. Safe to call from several threads at once.

        ``source`` is the fetch's file, opened; else it is opened for this.
        """
        view = place = fetch.place()
        if view is None:
            nbytes = fetch.chunk.nbytes
            view = bounce(nbytes) if isinstance(fetch.into, memoryview) else fetch.into.room(nbytes)
        chunk = fetch.chunk
        try:
            self.read_chunk(fetch.file, chunk.entry, chunk.index, chunk.offset, view, source)
        except (DamagedError, StoreError) as error:
            self._repair(fetch, view, error)
        if place is None:
            fetch.land(view)

    def _repair(self, fetch: Fetch, view: memoryview, error: CkptError) -> None:
        """Fill ``view`` with a chunk's bytes from wherever they are right, else raise ``error``."""
        file, chunk = fetch.file, fetch.chunk
        span = chunk_span(file, chunk.entry, chunk.index, chunk.offset, chunk.nbytes)
        view[:] = self.sources.span(file.name, span, error)[1]

    def fetch_together(self, fetches: Sequence[Fetch], source: Source | None = None) -> None:
        """The same for neighbouring small chunks of one raw file, in the order of their offsets, with one read."""
        if len(fetches) == 1:
            self.fetch(fetches[0], source)
            return
        file, start = fetches[0].file, fetches[0].chunk.offset
        last = fetches[-1].chunk
        span = bounce(last.offset + last.nbytes - start)
        unread: CkptError | None = None
        try:
            self._read_at(file, file.header_nbytes + start, span, source)
        except (DamagedError, StoreError) as error:
            unread = error
        for fetch in fetches:
            chunk = fetch.chunk
            view = span[chunk.offset - start : chunk.offset - start + chunk.nbytes]
            wanted = file.chunks[chunk.index]
            if unread is not None:
                self._repair(fetch, view, unread)
            elif (found := records.digest(view)) != wanted:
                self._repair(fetch, view, wrong_digest(found, wanted, self._what(file, chunk.entry, chunk.offset)))
            place = fetch.place()
            if place is not None:
                place[:] = view
            else:
                fetch.land(view)

    def _rank_tensor(self, rank: int, name: str) -> RankTensor:
        for tensor in self.rank_tensors(rank):
            if tensor.name == name:
                return tensor
        where = self.where(self.commit.parts[rank].name)
        raise NotFoundError(f"{where}: rank {rank} has no tensor {name!r} of its own")

    def chunk_digests(self, name: str, *, rank: int | None = None) -> Iterator[tuple[int, Box, tuple[str, ...]]]:
        """``(rank, piece, digests)`` of every shard of a tensor: equal ones have equal bytes. Reads parts only."""
        if rank is not None:
            holders = iter([(rank, whole_box(self._rank_tensor(rank, name).shape))])
        else:
            digest, tensor = self._home(name)
            name = tensor.name
            holders = self.layout_boxes(digest).holders(tensor, whole_box(tensor.shape))
        for holder, piece in holders:
            file, placed = self._placed(holder, name, piece)
            yield holder, piece, shard_digests(file.file, placed)

    def read_chunk(
        self, file: DataFile, entry: Entry, index: int, offset: int, into: memoryview, source: Source | None = None
    ) -> None:
        """Fill ``into`` with one chunk as it lies in its file, and check its digest.

        ``index`` is its place among the file's chunks, ``offset`` its place in the payload, ``source`` the opened file.
        """
        if file.encoding == RAW:
            # Digested while it arrives: when all of it is there, its first bytes have left the processor's cache.
            running = records.running_digest()
            self._read_at(file, file.header_nbytes + offset, into, source, running.update)
            found = running.hexdigest()
            if found != file.chunks[index]:
                raise wrong_digest(found, file.chunks[index], self._what(file, entry, offset))
            return
        packed, what = file.packed[index], self._what(file, entry, offset)
        if packed.nbytes > into.nbytes:  # it would have been stored raw
            raise DamagedError(f"{what}: {packed.nbytes} bytes stored for {into.nbytes}")
        stored = bytearray(packed.nbytes)
        self._read_at(file, packed.offset, memoryview(stored), source)
        into[:] = decode_chunk(stored, packed.encoding, into.nbytes, what)
        check_digest(into, packed.digest, what)

    def _what(self, file: DataFile, entry: Entry, offset: int) -> str:
        return f"{self.where(file.name)}: {chunk_text(entry, offset)}"

    def _read_at(
        self, file: DataFile, offset: int, into: memoryview, source: Source | None, seen: Seen | None = None
    ) -> None:
        with self._pinned(file), contextlib.ExitStack() as stack:
            (source or stack.enter_context(self.open_source(file))).read_into(offset, into, seen)

    @contextlib.contextmanager
    def _pinned(self, file: DataFile) -> Iterator[None]:
        try:
            yield
        except NotFoundError:
            raise DamagedError(f"{self.where(file.name)}: missing, though COMMIT needs it") from None
        except StoreError as error:
            raise as_damage(error) from error.__cause__

    def _placed(self, rank: int, name: str, piece: Box) -> tuple[FileShards, Placed]:
        if rank not in self._tables:
            part = self.part(rank)
            table: dict[str, list[tuple[FileShards, Placed]]] = {}
            for file in self.files(part):
                for placed in file.shards:
                    table.setdefault(placed.entry.name, []).append((file, placed))
            self._tables[rank] = table
            self._cached_shards += len(table)
            while self._cached_shards > CACHED_SHARDS and len(self._tables) > 1:
                self._cached_shards -= len(self._tables.popitem(last=False)[1])
        self._tables.move_to_end(rank)
        for found in self._tables[rank].get(name, ()):
            if found[1].entry.box == piece:
                return found
        raise DamagedError(f"{self.where(self.commit.parts[rank].name)}: has no shard {name}{piece}")
