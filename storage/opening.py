"""From a storage url to a store, and the proof that the store keeps the promises the journal stands on."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from fsspec.core import split_protocol  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from storage.errors import ObjectExists, PreconditionFailed, StorageUnusable
from storage.filesystem import Store, token_of
from storage.local import LocalStore
from storage.memory import MemoryStore

_memory_stores: dict[str, MemoryStore] = {}


def _open_memory(path: str) -> Store:
    return _memory_stores.setdefault(path, MemoryStore(path))


def _open_local(path: str) -> Store:
    return LocalStore(path)


_OPENERS: dict[str, Callable[[str], Store]] = {"file": _open_local, "local": _open_local, "memory": _open_memory}


def open_store(url: str) -> Store:
    """The store at `url`: a path, file:// or memory://. Touches nothing. Raises `StorageUnusable` for other schemes."""
    protocol, path = split_protocol(url)
    opener = _OPENERS.get(str(protocol or "file"))
    if opener is None or not path:
        raise StorageUnusable(
            f"storage url {url!r}",
            expected="a path or an url that starts with " + ", ".join(f"{name}://" for name in _OPENERS),
            action="set storage.url to a supported place",
        )
    return opener(str(path))


def probe(store: Store, prefix: str) -> None:
    """Check that the store creates exclusively and swaps conditionally, below `prefix`; leaves nothing behind.

    Several S3 servers accept the conditional headers and ignore them. Raises `StorageUnusable`.
    """
    key = f"{prefix}/probe-{uuid.uuid4().hex}"
    try:
        _probe_create(store, key)
        _probe_swap(store, f"{key}-swap")
    finally:
        store.delete([key, f"{key}-swap"])


def _probe_create(store: Store, key: str) -> None:
    store.create(key, b"first")
    try:
        store.create(key, b"second")
    except ObjectExists:
        if store.read(key) == b"first":
            return
    raise _no_exclusive(store, "created the same object twice")


def _probe_swap(store: Store, key: str) -> None:
    token = store.swap(key, b"first", None)
    try:
        store.swap(key, b"second", token_of(b"another value"))
    except PreconditionFailed:
        store.swap(key, b"third", token)
        if store.read(key) == b"third":
            return
    raise _no_exclusive(store, "replaced an object in spite of a failed precondition")


def _no_exclusive(store: Store, what: str) -> StorageUnusable:
    return StorageUnusable(
        f"{store.url} {what}",
        expected="a store with exclusive creation and compare-and-swap",
        action="use another store; two writers could destroy a run here",
        code="store_not_exclusive",
    )
