"""Checkpoints: the trainer's state as content-addressed shards plus one manifest that names them all.

Objects first, then the manifest, then (by the caller) the `checkpoint_published` record: a crash anywhere leaves the
previous checkpoint valid. Shards that the newest published checkpoint already holds are referenced, not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from storage.buffers import NamedBuffer, from_safetensors, to_safetensors
from storage.errors import ArtifactCorrupt, ObjectExists, ObjectMissing, SchemaUnsupported
from storage.filesystem import Bytes, Store, read_proven
from storage.runs import RunPaths
from storage.schema import SCHEMA

A = TypeVar("A")
B = TypeVar("B")
FORMAT = "tidegate-checkpoint"
SHARD_BYTES = 32 * 1024 * 1024
UPLOADS = 4


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies: the concatenation of tensor `key` of object `digest`, for each part in order."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, str], ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete checkpoint. `objects` maps digest to size in bytes, `meta` holds the state that is not a tensor."""

    format: str
    schema: int
    run: str
    step: int
    incarnation: int
    state_digest: str
    weights_digest: str
    meta: str
    tensors: dict[str, Tensor]
    objects: dict[str, int]


class Written(NamedTuple):
    """A manifest in the store. `size` is what the checkpoint refers to, `written` what was uploaded, in bytes."""

    name: str
    digest: str
    size: int
    written: int


class Capture(NamedTuple):
    """The trainer's state between two optimizer steps, in host memory that nobody changes."""

    step: int
    state_digest: str
    weights_digest: str
    meta: str
    buffers: Mapping[str, NamedBuffer]


def _parts(buffers: Mapping[str, NamedBuffer]) -> Iterator[tuple[str, NamedBuffer]]:
    """Tensors in name order, those above the shard size cut into flat pieces named `<name>#<k>`."""
    for name in sorted(buffers):
        buffer = buffers[name]
        if buffer.num_bytes <= SHARD_BYTES:
            yield name, buffer
            continue
        for k, start in enumerate(range(0, buffer.num_bytes, SHARD_BYTES)):
            piece = buffer.data[start : start + SHARD_BYTES]
            yield f"{name}#{k}", NamedBuffer("U8", (len(piece),), piece)


def _shards(buffers: Mapping[str, NamedBuffer]) -> Iterator[dict[str, NamedBuffer]]:
    shard: dict[str, NamedBuffer] = {}
    size = 0
    for name, buffer in _parts(buffers):
        if shard and size + buffer.num_bytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = buffer
        size += buffer.num_bytes
    if shard:
        yield shard


def write_checkpoint(
    store: Store, run: str, incarnation: int, capture: Capture, known: Collection[str] = frozenset()
) -> Written:
    """Upload shards and manifest. `known` are objects of the newest published checkpoint. May be repeated."""
    paths = RunPaths(run)

    def upload(shard: dict[str, NamedBuffer]) -> tuple[str, int, int, list[str]]:
        data = to_safetensors(shard)
        digest = hashlib.sha256(data).hexdigest()
        written = 0 if digest in known else _create_same(store, paths.object(digest), data)
        return digest, len(data), written, list(shard)

    done = _each(upload, list(_shards(capture.buffers)))
    where = {key: digest for digest, _, _, keys in done for key in keys}
    manifest = Manifest(
        FORMAT,
        SCHEMA,
        run,
        capture.step,
        incarnation,
        capture.state_digest,
        capture.weights_digest,
        capture.meta,
        {name: _tensor(name, buffer, where) for name, buffer in capture.buffers.items()},
        {digest: size for digest, size, _, _ in done},
    )
    data = msgspec.json.encode(manifest)
    name = f"{capture.step:09d}-{incarnation:06d}.json"
    written = _create_same(store, paths.manifest(name), data) + sum(done_[2] for done_ in done)
    return Written(name, hashlib.sha256(data).hexdigest(), sum(manifest.objects.values()), written)


def _each(act: Callable[[A], B], items: list[A]) -> list[B]:
    """`act` on every item, several at once."""
    if len(items) == 1:
        return [act(items[0])]
    with ThreadPoolExecutor(UPLOADS) as pool:
        return list(pool.map(act, items))


def _tensor(name: str, buffer: NamedBuffer, where: dict[str, str]) -> Tensor:
    keys = [name] if name in where else []
    while not keys or (keys[-1] != name and f"{name}#{len(keys)}" in where):
        keys.append(f"{name}#{len(keys)}")
    return Tensor(buffer.dtype, buffer.shape, tuple((where[key], key) for key in keys))


def _create_same(store: Store, key: str, data: Bytes) -> int:
    """Create an object; one that exists must hold the same bytes. Returns the bytes written."""
    try:
        store.create(key, data)
        return len(data)
    except ObjectExists:
        if store.read(key) == data:
            return 0
    raise ArtifactCorrupt(
        f"{key} exists with other content",
        expected="the content its name promises",
        action="the object was altered; delete it if no checkpoint you need refers to it",
        code="digest",
    )


def read_manifest(store: Store, run: str, name: str, digest: str) -> Manifest:
    """Raises `ArtifactCorrupt`, `SchemaUnsupported`."""
    key = RunPaths(run).manifest(name)
    data = _read_checked(store, key, digest, None)
    stated = msgspec.json.decode(data)
    if (stated.get("format"), stated.get("schema")) != (FORMAT, SCHEMA):
        raise SchemaUnsupported(
            f"{key}: {stated.get('format')} schema {stated.get('schema')}",
            expected=f"{FORMAT} schema {SCHEMA}",
            action="read this checkpoint with the Tidegate version that wrote it; nothing was changed",
        )
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

    def check(item: tuple[str, int]) -> None:
        _read_checked(store, RunPaths(run).object(item[0]), *item)

    _each(check, list(manifest.objects.items()))


def read_buffers(store: Store, run: str, manifest: Manifest) -> dict[str, NamedBuffer]:
    """All tensors of a checkpoint; size and digest are checked before parsing. Raises `ArtifactCorrupt`."""
    read = _each(lambda item: (item[0], read_object(store, run, *item)), list(manifest.objects.items()))
    objects = dict(read)
    return {name: _join(name, tensor, objects) for name, tensor in manifest.tensors.items()}


def read_object(store: Store, run: str, digest: str, size: int) -> dict[str, NamedBuffer]:
    """What lies in one object of a checkpoint; size and digest are checked before parsing. Raises `ArtifactCorrupt`."""
    key = RunPaths(run).object(digest)
    return from_safetensors(_read_checked(store, key, digest, size), key)


def tensor_piece(pieces: Mapping[str, NamedBuffer], name: str, part: tuple[str, str]) -> npt.NDArray[np.uint8]:
    """The bytes of one part of tensor `name`, from the pieces of its object. Raises `ArtifactCorrupt`."""
    if part[1] not in pieces:
        raise ArtifactCorrupt(
            f"tensor {name}: part {part[1]!r} is not in its object",
            expected="every part of the manifest",
            action="restore the checkpoint from a copy",
            code="mixed_cut",
        )
    return pieces[part[1]].data


def _join(name: str, tensor: Tensor, objects: Mapping[str, Mapping[str, NamedBuffer]]) -> NamedBuffer:
    pieces = [tensor_piece(objects.get(part[0], {}), name, part) for part in tensor.parts]
    return NamedBuffer(tensor.dtype, tensor.shape, pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
