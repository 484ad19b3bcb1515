"""Writes a captured state to a store: shards first, then the manifest that makes them a checkpoint.

The `checkpoint_published` record comes last, and from the caller: a crash anywhere leaves the previous checkpoint
valid. Every object is named by its content, so a publication may be repeated, also by another process, after any error.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import msgspec

from storage.capture import Capture
from storage.checkpoint import FORMAT, CutTensor, Manifest, Written, read_manifest
from storage.each import each
from storage.errors import ArtifactCorrupt, SchemaUnsupported
from storage.filesystem import Bytes, Store, create_same
from storage.layout import Layout, Shard
from storage.runs import RunPaths
from storage.schema import SCHEMA

HASHING = 2
"""Threads that hash ahead, so that as many shards are on their way as the store takes at once."""

log = logging.getLogger(__name__)


class Newest(NamedTuple):
    """The newest published checkpoint."""

    manifest: str
    digest: str


class Progress(NamedTuple):
    """Bytes of shards that are in the store, and bytes of all shards. (0, 0) before the first publication."""

    done: int
    size: int


class Publisher(Protocol):
    """Publishes the captures of one trainer, one at a time."""

    @property
    def progress(self) -> Progress:
        """Of the publication under way or the last one."""
        ...

    def publish(self, run: str, incarnation: int, capture: Capture, newest: Newest | None) -> Written:
        """Write what `newest` does not hold already. Blocks; may be repeated after an error.

        A damaged `newest` is no reason to stop: then everything is written that is not there whole. Raises the store's
        errors, `ArtifactCorrupt` when another checkpoint has this one's name, and `UploadLost`.
        """
        ...

    def close(self) -> None: ...


class ThreadPublisher:
    """Writes with threads of this process. `tell` hears of progress, in any of them."""

    def __init__(self, store: Store, tell: Callable[[Progress], None] = lambda progress: None) -> None:
        self._store, self._tell = store, tell
        self._lock = threading.Lock()
        self._digests: dict[str, str] = {}
        self.progress = Progress(0, 0)

    def close(self) -> None:
        """Nothing is left when `publish` has returned."""

    def publish(self, run: str, incarnation: int, capture: Capture, newest: Newest | None) -> Written:
        """See `Publisher`."""
        known = _objects_of(self._store, run, newest) if newest else {}
        paths, layout = RunPaths(run), capture.layout
        self._advance(Progress(0, layout.num_bytes))

        def settle(item: tuple[Shard, Future[str]]) -> tuple[str, int]:
            shard, digest = item[0], item[1].result()
            data = _file(capture, shard)
            written = 0 if digest in known else _create(self._store, paths.object(digest), digest, data)
            with self._lock:
                before = self.progress
                self._advance(Progress(before.done + shard.size, before.size))
                self._log(capture.step, before)
            return digest, written

        with ThreadPoolExecutor(HASHING) as pool:
            hashing = [pool.submit(self._digest, shard, capture) for shard in layout.shards]
            try:
                settled = each(settle, list(zip(layout.shards, hashing, strict=True)))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        self._forget_but({digest for digest, _ in settled})
        objects = {digest: shard.size for shard, (digest, _) in zip(layout.shards, settled, strict=True)}
        data = msgspec.json.encode(_manifest(run, incarnation, capture, objects))
        name = f"{capture.step:09d}-{incarnation:06d}.json"
        written = create_same(self._store, paths.manifest(name), data) + sum(size for _, size in settled)
        return Written(name, hashlib.sha256(data).hexdigest(), layout.num_bytes, written)

    def _advance(self, progress: Progress) -> None:
        self.progress = progress
        self._tell(progress)

    def _log(self, step: int, before: Progress) -> None:
        """A line for each tenth."""
        now = self.progress
        if now.done * 10 // now.size > before.done * 10 // now.size:
            log.info("op=publish_checkpoint phase=shards step=%d done=%d of=%d", step, now.done, now.size)

    def _digest(self, shard: Shard, capture: Capture) -> str:
        """sha256 of a file. That of the last publication serves again when the file is made of the same tensors."""
        if not capture.digests:
            return hashlib.sha256(_file(capture, shard)).hexdigest()
        parts = [f"{part.start}:{capture.digests[part.tensor]}" for part in shard.parts]
        made_of = hashlib.sha256(shard.header + "\n".join(parts).encode()).hexdigest()
        digest = self._digests.get(made_of) or hashlib.sha256(_file(capture, shard)).hexdigest()
        with self._lock:
            self._digests[made_of] = digest
        return digest

    def _forget_but(self, needed: set[str]) -> None:
        self._digests = {made_of: digest for made_of, digest in self._digests.items() if digest in needed}


def _objects_of(store: Store, run: str, newest: Newest) -> dict[str, int]:
    """What need not be written again."""
    try:
        return read_manifest(store, run, *newest).objects
    except (ArtifactCorrupt, SchemaUnsupported) as error:
        log.error("op=publish_checkpoint newest=%s decision=write_everything reason=%s", newest.manifest, error)
        return {}


def _create(store: Store, key: str, digest: str, data: Bytes) -> int:
    """Create an object that is named by its content; one that was damaged since is replaced, in one step. Returns the
    bytes written."""
    try:
        return create_same(store, key, data)
    except ArtifactCorrupt as error:
        found, token = store.read_versioned(key)
        if hashlib.sha256(found).hexdigest() == digest:
            return 0  # the bits flipped on the wire
        log.error("op=publish_checkpoint object=%s decision=replace reason=%s", key, error)
        store.swap(key, data, token)
        return len(data)


def _file(capture: Capture, shard: Shard) -> memoryview:
    return capture.memory.view[shard.offset : shard.offset + shard.size]


def _manifest(run: str, incarnation: int, capture: Capture, objects: dict[str, int]) -> Manifest:
    return Manifest(
        FORMAT,
        SCHEMA,
        run,
        capture.step,
        incarnation,
        capture.state_digest,
        capture.weights_digest,
        capture.meta,
        _cut(capture.layout),
        objects,
    )


def _cut(layout: Layout) -> dict[str, CutTensor]:
    return {name: CutTensor(*layout.tensors[name], tuple(keys)) for name, keys in layout.cut().items()}
