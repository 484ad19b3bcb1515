"""From a storage url to a store, and the proof that the store keeps the promises the journal stands on."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fsspec.core import split_protocol  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from storage.errors import ObjectExists, ObjectMissing, PreconditionFailed, StorageUnusable, StoreUnavailable
from storage.filesystem import Store, token_of
from storage.local import LocalStore
from storage.memory import MemoryStore

FIRST_CONTACT_S = 15.0
RACERS = 8

_memory_stores: dict[str, MemoryStore] = {}


def _open_memory(path: str) -> Store:
    return _memory_stores.setdefault(path, MemoryStore(path))


def _open_local(path: str) -> Store:
    return LocalStore(path)


def _open_s3(path: str) -> Store:
    from storage.s3 import S3Store
    from storage.s3_location import parse_s3

    return S3Store(parse_s3(f"s3://{path}"))


_OPENERS: dict[str, Callable[[str], Store]] = {
    "file": _open_local,
    "local": _open_local,
    "memory": _open_memory,
    "s3": _open_s3,
}


def open_store(url: str) -> Store:
    """The store at `url`: a path, file://, memory:// or s3://. Touches nothing.

    Raises `StorageUnusable` for other schemes."""
    protocol, path = split_protocol(url)
    opener = _OPENERS.get(str(protocol or "file"))
    if opener is None or not path:
        raise StorageUnusable(
            f"storage url {url!r}",
            expected="a path or an url that starts with " + ", ".join(f"{name}://" for name in _OPENERS),
            action="set storage.url to a supported place",
        )
    return opener(str(path))


def reach(store: Store, prefix: str) -> None:
    """Touch the store for the first time, reading only. Raises `StorageUnusable`, also when it does not answer soon: at
    the start that is a wrong address rather than a fault to wait for."""
    try:
        store.patient(FIRST_CONTACT_S).read(f"{prefix}/none")
    except ObjectMissing:
        return
    except StoreUnavailable as error:
        raise StorageUnusable(
            error.found,
            expected=f"a store that answers within {FIRST_CONTACT_S:.0f} s",
            action=error.action,
            code=error.code,
        ) from error


def probe(store: Store, prefix: str) -> None:
    """Check that the store creates exclusively, also under a race, and swaps conditionally, below `prefix`; leaves
    nothing behind.

    Several S3 servers accept the conditional headers and ignore them. Raises `StorageUnusable`.
    """
    key = f"{prefix}/probe-{uuid.uuid4().hex}"
    try:
        _probe_create(store, key)
        _probe_race(store, f"{key}-race")
        _probe_swap(store, f"{key}-swap")
    finally:
        store.delete([key, f"{key}-race", f"{key}-swap"])


def _probe_create(store: Store, key: str) -> None:
    store.create(key, b"first")
    try:
        store.create(key, b"second")
    except ObjectExists:
        if store.read(key) == b"first":
            return
    raise _no_exclusive(store, "created the same object twice")


def _probe_race(store: Store, key: str) -> None:
    def create(racer: int) -> bool:
        try:
            store.create(key, b"%d" % racer)
            return True
        except ObjectExists:
            return False

    with ThreadPoolExecutor(RACERS) as pool:
        won = [racer for racer, alone in enumerate(pool.map(create, range(RACERS))) if alone]
    if len(won) != 1 or store.read(key) != b"%d" % won[0]:
        raise _no_exclusive(store, f"let {len(won)} of {RACERS} racing writers create the same object")


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
