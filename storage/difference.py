"""How two published checkpoints differ, of one run or of two: tensors, settings, and the bytes they share.

Objects are named by their sha256, so a tensor that lies in the same objects on both sides is equal without being read.
Numbers that are compared are proven by their object's digest first; of other objects only the header is read. Memory
holds one tensor and a few objects of each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from storage import schema
from storage.buffers import NamedBuffer, read_safetensors_header
from storage.checkpoint import Manifest, piece_missing, read_manifest, read_object
from storage.errors import ArtifactCorrupt, ObjectMissing, UnknownCheckpoint
from storage.filesystem import Store
from storage.history import read_all
from storage.journal import rows_of
from storage.numbers import Numbers, Tally
from storage.runs import ABSENT, RunInfo, RunPaths, changed_to, flat, open_run

_KEPT_OBJECTS = 2
_PLACES = ("run", "storage.url")
"""Settings that say where a run lies, not what it is."""
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One side of a comparison. `name` is that of its manifest; `fields` is what is not a tensor, by dotted name."""

    store: Store
    name: str
    manifest: Manifest
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """`kind` is "new" (only right), "gone" (only left), "form" (other dtype or shape), or "changed", with `numbers`."""

    name: str
    kind: str
    left: str
    right: str
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """`tensors` and `fields` hold only what differs. Bytes are those of objects; `bytes_read` were read to find out."""

    tensors: list[TensorDifference]
    num_equal: int
    fields: dict[str, tuple[object, object]]
    bytes_shared: int
    bytes_left: int
    bytes_right: int
    bytes_read: int

    @property
    def equal(self) -> bool:
        return not self.tensors and not self.fields


class Published:
    """The checkpoints that a run's journal published and has not retired."""

    def __init__(self, store: Store, run: str) -> None:
        """Reads the whole journal. Raises `UnknownRun` and what reading raises."""
        self._store = store
        self._info = open_run(store, run)
        self._records: dict[int, schema.CheckpointPublished] = {}
        self._changes: list[tuple[int, dict[str, str]]] = []
        for row in rows_of(read_all(store, run)):
            if isinstance(row.record, schema.CheckpointPublished):
                self._records[row.record.step] = row.record
            elif isinstance(row.record, schema.Forked):
                self._records[row.record.step] = row.record.checkpoint
            elif isinstance(row.record, schema.Retired):
                gone = row.record.manifests
                self._records = {step: one for step, one in self._records.items() if one.manifest not in gone}
            elif isinstance(row.record, schema.StepsReverted):
                last = row.record.to_step
                self._records = {step: one for step, one in self._records.items() if step <= last}
            elif isinstance(row.record, schema.ConfigChanged):
                self._changes.append((row.seq, row.record.changes))

    def at(self, step: int | None) -> Checkpoint:
        """The checkpoint of `step`, as published last; of the newest step by default. Raises `UnknownCheckpoint`,
        `ArtifactCorrupt`, `SchemaUnsupported`."""
        chosen = max(self._records, default=None) if step is None else step
        record = None if chosen is None else self._records.get(chosen)
        if record is None:
            known = ", ".join(map(str, sorted(self._records))) or "none"
            raise UnknownCheckpoint(
                f"run {self._info.run!r} in {self._store.url} has checkpoints of steps: {known}",
                expected="one at all" if step is None else f"one of step {step}",
                action="name a step that has a checkpoint, as RUN@STEP",
            )
        manifest = read_manifest(self._store, self._info.run, record.manifest, record.digest)
        changes = [new for seq, new in self._changes if seq <= record.position]
        return Checkpoint(self._store, record.manifest, manifest, _fields(self._info, changes, manifest.meta))


def compare(left: Checkpoint, right: Checkpoint, say: Callable[[str], None] = lambda line: None) -> Difference:
    """Raises `ArtifactCorrupt` for an object that had to be read and is not what its digest says."""
    objects = _Objects(left), _Objects(right)
    ours, theirs = (one.tensors() for one in objects)
    found: list[TensorDifference] = []
    for name in sorted(ours.keys() | theirs.keys()):
        say(f"op=diff phase=tensors tensor={name} different={len(found)}")
        difference = _compare_tensor(name, ours.get(name), theirs.get(name), *objects)
        if difference is not None:
            found.append(difference)
    return Difference(
        tensors=found,
        num_equal=len(ours.keys() | theirs.keys()) - len(found),
        fields={name: pair for name, pair in _pairs(left.fields, right.fields) if pair[0] != pair[1]},
        bytes_shared=_bytes(left.manifest, lambda digest: digest in right.manifest.objects),
        bytes_left=_bytes(left.manifest, lambda digest: digest not in right.manifest.objects),
        bytes_right=_bytes(right.manifest, lambda digest: digest not in left.manifest.objects),
        bytes_read=sum(one.bytes_read for one in objects),
    )


# ---------------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies: the concatenation of tensor `key` of object `digest`, for each part in order."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, str], ...]


class _Objects:
    """Decoded objects of one checkpoint. Tensors lie in objects in the order of their names, so the last few do."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._store, self._manifest = checkpoint.store, checkpoint.manifest
        self._kept: dict[str, dict[str, NamedBuffer]] = {}
        self.bytes_read = 0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint, from its objects' headers. Raises `ArtifactCorrupt`."""
        cut = self._manifest.cut
        found: dict[str, Tensor] = {}
        for digest in self._manifest.objects:
            key = RunPaths(self._manifest.run).object(digest)
            header = read_safetensors_header(lambda start, end, key=key: self._read(key, start, end), key)
            found |= {name: Tensor(*form, ((digest, name),)) for name, form in header.items()}
        for name, one in cut.items():
            pieces = [found.pop(key, None) for key in one.keys]
            parts = [piece.parts[0] for piece in pieces if piece is not None]
            if len(parts) != len(one.keys):
                raise piece_missing(name, one.keys[pieces.index(None)])
            found[name] = Tensor(one.dtype, one.shape, tuple(parts))
        return found

    def _read(self, key: str, start: int, end: int) -> bytes:
        try:
            return self._store.read(key, start, end)
        except ObjectMissing as error:
            raise ArtifactCorrupt(
                f"{key} is missing", expected="an object of the checkpoint", action="restore it from a copy",
                code="missing",
            ) from error  # fmt: skip

    def piece(self, name: str, part: tuple[str, str]) -> _Bytes:
        digest, key = part
        if digest not in self._kept:
            if len(self._kept) == _KEPT_OBJECTS:
                del self._kept[next(iter(self._kept))]
            size = self._manifest.objects[digest]
            self._kept[digest] = read_object(self._store, self._manifest.run, digest, size)
            self.bytes_read += size
        if key not in self._kept[digest]:
            raise piece_missing(name, key)
        return self._kept[digest][key].data

    def whole(self, name: str, tensor: Tensor) -> _Bytes:
        return np.concatenate([self.piece(name, part) for part in tensor.parts])


def _compare_tensor(
    name: str, left: Tensor | None, right: Tensor | None, ours: _Objects, theirs: _Objects
) -> TensorDifference | None:
    if left is None or right is None:
        return TensorDifference(name, "new" if left is None else "gone", _form(left), _form(right))
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return TensorDifference(name, "form", _form(left), _form(right))
    tally = Tally(left.dtype)
    for one, other in _unequal_pieces(name, left, right, ours, theirs):
        tally.add(one, other)
    numbers = tally.numbers(math.prod(left.shape))
    return TensorDifference(name, "changed", _form(left), _form(right), numbers) if numbers.changed else None


def _unequal_pieces(
    name: str, left: Tensor, right: Tensor, ours: _Objects, theirs: _Objects
) -> list[tuple[_Bytes, _Bytes]]:
    """Pieces of both sides at the same place that may differ: those of the same object and key cannot."""
    if left.parts == right.parts:
        return []
    if len(left.parts) == len(right.parts):
        pieces = [
            (ours.piece(name, one), theirs.piece(name, other))
            for one, other in zip(left.parts, right.parts, strict=True)
            if one != other
        ]
        if all(len(one) == len(other) for one, other in pieces):
            return pieces
    return [(ours.whole(name, left), theirs.whole(name, right))]  # cut at other places


def _form(tensor: Tensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _bytes(manifest: Manifest, wanted: Callable[[str], bool]) -> int:
    return sum(size for digest, size in manifest.objects.items() if wanted(digest))


# ---------------------------------------------------------------------- fields


def _fields(info: RunInfo, changes: list[dict[str, str]], meta: str) -> dict[str, object]:
    """Settings are compared as texts, because that is how the journal records their changes ("old -> new")."""
    settings = {name: str(value) for name, value in flat(info.settings)}
    for change in changes:
        settings |= {name: changed_to(text) for name, text in change.items()}
    return {
        "num_siblings": info.num_siblings,
        "staleness": info.staleness,
        **{f"fingerprints.{name}": value for name, value in info.fingerprints.items()},
        **{f"settings.{name}": value for name, value in settings.items() if name not in _PLACES},
        **{f"meta.{name}" if name else "meta": value for name, value in flat(_parsed(meta))},
    }


def _parsed(meta: str) -> Any:
    try:
        return msgspec.json.decode(meta)
    except msgspec.DecodeError:
        return meta


def _pairs(left: Mapping[str, object], right: Mapping[str, object]) -> Iterator[tuple[str, tuple[object, object]]]:
    for name in sorted(left.keys() | right.keys()):
        yield name, (left.get(name, ABSENT), right.get(name, ABSENT))
