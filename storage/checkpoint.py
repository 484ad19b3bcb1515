"""Checkpoints: the trainer's state as content-addressed shards plus one manifest that names them all.

A manifest is complete or not there, and says with digests what every object holds; what is read is proven before it is
returned. `storage.publisher` writes them.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec
import numpy as np

from storage.buffers import NamedBuffer, from_safetensors
from storage.each import each
from storage.errors import ArtifactCorrupt, ObjectMissing
from storage.filesystem import Store, read_proven
from storage.runs import RunPaths
from storage.schema import SCHEMA
from storage.upgrades import changed, changes

FORMAT = "tidegate-checkpoint-2"


class CutTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor above the size of a shard: its bytes are those of the tensors `keys`, one after the other."""

    dtype: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete checkpoint. `objects` maps digest to size in bytes; what the objects hold, their own headers say, but
    for the tensors in `cut`. `meta` holds the state that is not a tensor."""

    format: str
    schema: int
    run: str
    step: int
    incarnation: int
    state_digest: str
    weights_digest: str
    meta: str
    cut: dict[str, CutTensor]
    objects: dict[str, int]


class Written(NamedTuple):
    """A manifest in the store. `size` is what the checkpoint refers to, `written` what was uploaded, in bytes."""

    name: str
    digest: str
    size: int
    written: int


def read_manifest(store: Store, run: str, name: str, digest: str) -> Manifest:
    """Raises `ArtifactCorrupt`, `SchemaUnsupported`."""
    key = RunPaths(run).manifest(name)
    data = _read_checked(store, key, digest, None)
    stated = msgspec.json.decode(data)
    steps = changes(key, (stated.get("schema"), stated.get("format")), (SCHEMA, FORMAT))
    if steps:
        stated = changed(steps, "manifest", stated)[1] | {"schema": SCHEMA, "format": FORMAT}
    manifest = msgspec.convert(stated, Manifest)
    if manifest.run != run:
        raise ArtifactCorrupt(
            f"{key} belongs to run {manifest.run!r}",
            expected=f"run {run!r}",
            action="restore the object from a copy",
            code="mixed_cut",
        )
    return manifest


def _read_checked(store: Store, key: str, digest: str, size: int | None) -> bytes:
    try:
        return read_proven(store, key, lambda data: _checked(data, key, digest, size))
    except ObjectMissing as error:
        raise ArtifactCorrupt(
            f"{key} is missing", expected="an object of the checkpoint", action="restore it from a copy", code="missing"
        ) from error


def _checked(data: bytes, key: str, digest: str, size: int | None) -> bytes:
    if size is not None and len(data) != size:
        raise ArtifactCorrupt(
            f"{key} has {len(data)} bytes", expected=f"{size} bytes", action="restore it from a copy", code="size"
        )
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise ArtifactCorrupt(
            f"{key} has sha256 {actual[:16]}…",
            expected=f"sha256 {digest[:16]}…",
            action="restore it from a copy",
            code="digest",
        )
    return data


def check_objects(store: Store, run: str, manifest: Manifest) -> None:
    """Read every object of a checkpoint and prove its digest. Raises `ArtifactCorrupt`."""

    each(lambda item: read_whole(store, run, *item), list(manifest.objects.items()))


def read_buffers(store: Store, run: str, manifest: Manifest) -> dict[str, NamedBuffer]:
    """All tensors of a checkpoint; size and digest are checked before parsing. Raises `ArtifactCorrupt`."""
    found: dict[str, NamedBuffer] = {}
    for tensors in each(lambda item: read_object(store, run, *item), list(manifest.objects.items())):
        found |= tensors
    for name, cut in manifest.cut.items():
        found[name] = _join(name, cut, found)
    return found


def read_object(store: Store, run: str, digest: str, size: int) -> dict[str, NamedBuffer]:
    """What lies in one object of a checkpoint; size and digest are checked before parsing. Raises `ArtifactCorrupt`."""
    return from_safetensors(read_whole(store, run, digest, size), RunPaths(run).object(digest))


def read_whole(store: Store, run: str, digest: str, size: int) -> bytes:
    """The bytes of one object, proven. Raises `ArtifactCorrupt`."""
    return _read_checked(store, RunPaths(run).object(digest), digest, size)


def _join(name: str, cut: CutTensor, found: dict[str, NamedBuffer]) -> NamedBuffer:
    """Takes the pieces out of `found`."""
    try:
        return NamedBuffer(cut.dtype, cut.shape, np.concatenate([found.pop(key).data for key in cut.keys]))
    except KeyError as error:
        raise piece_missing(name, error.args[0]) from error


def piece_missing(name: str, key: object) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"tensor {name}: part {key!r} is in no object of the checkpoint",
        expected="every part of the manifest",
        action="restore the checkpoint from a copy",
        code="mixed_cut",
    )
