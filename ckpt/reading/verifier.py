"""One step being verified: records, tilings and values here, the bytes of files in ``verify_files``."""

from __future__ import annotations

from ckpt.errors import CkptError, DamagedError, StoreError
from ckpt.format.commit import COMMIT, HF_INDEX, FileRef, check_step
from ckpt.format.layout import decode_layout, layout_key
from ckpt.format.metrics import METRICS, decode_metrics
from ckpt.format.parity import Parity, parse_record_name
from ckpt.format.part import Part
from ckpt.format.values import decode, values_digest
from ckpt.plan.boxes import LayoutBoxes
from ckpt.plan.files import file_tables
from ckpt.reading.checks import index_problems, layout_problems
from ckpt.reading.parity import parity_of, parity_refs
from ckpt.reading.remake import remade
from ckpt.reading.report import Problem, Progress, VerifyReport
from ckpt.reading.shards import part_files
from ckpt.reading.sources import COPY_PREFIX
from ckpt.reading.step import StepReader
from ckpt.reading.tree import without_torch
from ckpt.reading.verify_files import FileVerifier
from ckpt.run import LAYOUT_LIMIT_NBYTES, Run

# What a reader of the folder would take for a part of the step.
_LOOKS_OURS = (".safetensors", ".pack", ".index.json")


def without_place(run: Run, folder: str, message: str) -> str:
    """A message of a reader without the place that it starts with: a Problem has it already."""
    for prefix in (f"{run.url}/{folder}/", f"{run.url}/"):
        if message.startswith(prefix):
            return message[len(prefix) :].partition(": ")[2]
    return message


class Verifier:
    """One step being verified. Goes on after each problem with what is left, and with what can be had elsewhere."""

    def __init__(self, reader: StepReader, progress: Progress | None) -> None:
        self.reader = reader
        self.run, self.attempt, self.commit = reader.run, reader.attempt, reader.commit
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._files_checked = FileVerifier(reader, self._problems, progress)
        self._records = self._bytes_read = 0
        self._layouts: dict[str, LayoutBoxes] = {}

    def report(self) -> VerifyReport:
        """Verify, and say what was found."""
        files = self._files_checked
        self._check_layouts()
        parts = {rank: part for rank in range(self.commit.world) if (part := self._check_part(rank)) is not None}
        parities = self._check_pinned(parts)
        files.total = sum(file.nbytes for part in parts.values() for file in part.files)
        files.total += sum(parity.nbytes for parity in parities.values())
        self._check_names(parts)
        tensors = self._check_tiling()
        self._check_values(parts)
        for rank, part in parts.items():
            self._check_data(rank, part)
        for name, parity in parities.items():
            self._check_members(name, parity, parts)
            files.check_xor(parity)
        return VerifyReport(
            run=self.run.url,
            step=self.attempt.step,
            attempt=self.attempt.label,
            problems=tuple(self._problems),
            notes=tuple(self._notes),
            files=self._records + files.files,
            tensors=tensors + sum(len(part.rank_tensors) for part in parts.values()),
            bytes_read=self._bytes_read + files.bytes_read,
        )

    # -- problems --------------------------------------------------------------------------

    def _problem(self, file: str, what: str, tensor: str | None = None, repair: str | None = None) -> None:
        self._problems.append(Problem(file, what, tensor, repair=repair))

    def _key(self, name: str) -> str:
        return self.run.key(self.attempt, name)

    def _caught(self, file: str, error: CkptError, repair: str | None = None) -> None:
        what = without_place(self.run, self.attempt.folder, str(error)).removeprefix(f"{file}: ")
        self._problem(file, what, repair=repair)

    # -- records ---------------------------------------------------------------------------

    def _check_layouts(self) -> None:
        for ref in self.commit.layouts:
            key = layout_key(ref.digest)
            try:
                self.run.layout(ref.digest)
                size = self.run.store.size(key)
            except CkptError as error:
                self._missed_layout(ref.digest, error)
                continue
            self._layouts[ref.digest] = self.reader.layout_boxes(ref.digest)
            self._records += 1
            self._bytes_read += size
            if size != ref.nbytes:
                self._problem(key, f"{size} bytes, COMMIT says {ref.nbytes}")

    def _missed_layout(self, digest: str, error: CkptError) -> None:
        """Go on with the layout that is right elsewhere, if there is one."""
        source = None
        try:
            _, source = self.reader.sources.small(
                layout_key(digest), lambda raw, _: decode_layout(raw, digest), LAYOUT_LIMIT_NBYTES, error
            )
            self._layouts[digest] = self.reader.layout_boxes(digest)
        except CkptError:
            pass  # what is wrong is said below
        self._caught(layout_key(digest), error, source)

    def _check_part(self, rank: int) -> Part | None:
        ref = self.commit.parts[rank]
        key = self._key(ref.name)
        before = len(self._problems)
        try:
            self.run.pinned_file(self.attempt, ref.name, ref.nbytes, ref.digest)
        except CkptError as error:
            self._caught(key, error, self._elsewhere(ref, error))
        else:
            self._records += 1
            self._bytes_read += ref.nbytes
        try:
            return self.reader.part(rank)  # from elsewhere where it is not right here
        except CkptError as error:
            if len(self._problems) == before:
                self._caught(key, error)
            return None

    def _elsewhere(self, ref: FileRef, error: CkptError) -> str | None:
        """Where a pinned file can be had that is not right here."""
        try:
            return self.reader.sources.pinned(ref, error)[1]
        except CkptError:
            return None

    def _check_values(self, parts: dict[int, Part]) -> None:
        first = set(self.reader.value_ranks())
        known: dict[tuple[str, str], tuple[str, int]] = {}  # (layout or "", top-level key) -> digest, rank
        for rank, part in parts.items():
            key = self._key(self.commit.parts[rank].name)
            if rank in first and part.values is None:
                self._problem(key, "has no values, though it is the first rank of its layout")
            for name, node in {**(part.values or {}), **part.rank_values}.items():
                try:
                    decode(without_torch(node), name)
                except DamagedError as error:
                    self._problem(key, f"value {error}")
            for name, node in (part.values or {}).items():
                said = part.values_digests.get(name) or part.values_digests.get(f"group:{name}")
                if said is not None and said != values_digest(node):
                    self._problem(key, f"value {name}: digest {values_digest(node)}, the same part says {said}")
            for name, digest in part.values_digests.items():
                # A module's or optimizer's values may differ between layouts, as with pipeline stages.
                scope = part.layout if name.startswith("group:") else ""
                before = known.setdefault((scope, name), (digest, rank))
                if before[0] != digest:
                    label = name.removeprefix("group:")
                    self._problem(key, f"value {label}: digest {digest}, rank {before[1]} has {before[0]}")

    def _check_names(self, parts: dict[int, Part]) -> None:
        """Nothing that looks like a file of the step is there besides those that COMMIT needs."""
        expected = {COMMIT, *(ref.name for ref in self.commit.parts), *(ref.name for ref in self.commit.files)}
        expected |= {file.name for part in parts.values() for file in part.files}
        expected |= {ref.name.removesuffix("json") + "xor" for _, ref in parity_refs(self.commit)}
        try:
            found = set(self.run.store.list(self.attempt.folder))
        except StoreError as error:
            self._caught(self.attempt.folder, error)
            return
        # Files that are missing are found when they are read. Without its part a file's name is not known.
        complete = len(parts) == self.commit.world
        for name in sorted(found - expected):
            if name.startswith(COPY_PREFIX):
                self._notes.append(f"{self._key(name)}: left by a repair that was stopped; `ckpt repair` removes it")
            elif complete and (name.endswith(_LOOKS_OURS) or name.startswith("part-")):
                self._problem(self._key(name), "unexpected: COMMIT does not name it, so it is not from this save")
            else:
                self._notes.append(f"{self._key(name)}: not a file of this step, readers ignore it")

    # -- tensors ---------------------------------------------------------------------------

    def _check_tiling(self) -> int:
        """The shards of each tensor make it up exactly; how many tensors there are."""
        names: set[str] = set()
        for digest, boxes in self._layouts.items():
            names.update(tensor.name for tensor in boxes.layout.tensors)
            for tensor, what in layout_problems(boxes):
                self._problem(layout_key(digest), what, tensor)
        if len(self._layouts) == len(self.commit.layouts):
            try:
                layouts = {digest: boxes.layout for digest, boxes in self._layouts.items()}
                check_step(self.commit.layouts, self.commit.world, layouts, self.reader.where(COMMIT))
            except DamagedError as error:
                self._caught(self._key(COMMIT), error)
        return len(names)

    def _check_data(self, rank: int, part: Part) -> None:
        boxes = self._layouts.get(part.layout)
        if boxes is None:
            return  # reported already; without it nothing says what the bytes are
        key = self._key(self.commit.parts[rank].name)
        try:
            tables = file_tables(boxes.layout, rank, part.rank_tensors, boxes)
            files = part_files(part, tables, key)
        except DamagedError as error:
            self._problem(key, str(error).removeprefix(f"{key}: "))
            return
        for shards in files:
            self._files_checked.check_data(shards)

    # -- other files -----------------------------------------------------------------------

    def _check_pinned(self, parts: dict[int, Part]) -> dict[str, Parity]:
        """The files that COMMIT pins besides parts; the parity records among them, by name."""
        parities: dict[str, Parity] = {}
        for ref in self.commit.files:
            key = self._key(ref.name)
            try:
                raw = self.run.pinned_file(self.attempt, ref.name, ref.nbytes, ref.digest)
                self._records += 1
                self._bytes_read += len(raw)
            except (CkptError, ValueError) as error:
                what = without_place(self.run, self.attempt.folder, str(error))
                source, found = self._remade(ref, error)
                self._problem(key, what, repair=source)
                if found is None:
                    continue
                raw = found
            complete = len(parts) == self.commit.world and len(self._layouts) == len(self.commit.layouts)
            if ref.name == HF_INDEX and complete:
                for tensor, what in index_problems(raw, self._model_keys(parts)):
                    self._problem(key, what, tensor)
            if ref.name == METRICS:
                try:
                    decode_metrics(raw, self.attempt, self.reader.where(METRICS))
                except CkptError as error:
                    self._caught(key, error)
            if parse_record_name(ref.name) is not None:
                try:
                    parities[ref.name] = parity_of(self.commit, ref, raw, self.reader.where(ref.name))
                except DamagedError as error:
                    self._caught(key, error)
        return parities

    def _remade(self, ref: FileRef, error: Exception) -> tuple[str | None, bytes | None]:
        if not isinstance(error, CkptError):
            return None, None
        try:
            raw, source = remade(self.reader, ref, error)
        except CkptError:
            return None, None
        return source, raw

    def _check_members(self, name: str, parity: Parity, parts: dict[int, Part]) -> None:
        """A parity record has all files of its ranks, as their parts have them."""
        ranks = {member.rank for member in parity.members}
        if not ranks <= set(parts):
            return  # reported already
        listed = [(member.rank, member.name, member.nbytes) for member in parity.members]
        there = [(rank, file.name, file.nbytes) for rank in sorted(ranks) for file in parts[rank].files]
        if listed != there:
            wrong = next((has for has, wants in zip(listed, there, strict=False) if has != wants), None)
            what = "leaves out a file of its ranks" if wrong is None else f"has {wrong[1]} with {wrong[2]} bytes"
            self._problem(self._key(name), f"{what}, which is not what the parts of its ranks say")

    def _model_keys(self, parts: dict[int, Part]) -> dict[str, set[str]]:
        """Key in a model file -> the files that have it."""
        there: dict[str, set[str]] = {}
        for rank, part in parts.items():
            boxes = self._layouts.get(part.layout)
            names = {file.group: file.name for file in part.files}
            if boxes is not None and "model" in names:
                for entry in file_tables(boxes.layout, rank, (), boxes).get("model", []):
                    there.setdefault(entry.key, set()).add(names["model"])
        return there
