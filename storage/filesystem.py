"""The one interface to durable storage.

`Store` promises: `create` is exclusive and all-or-nothing, an object never changes after `create` returned, `read` sees
every object whose `create` returned in any process, and `swap` is a compare-and-swap. Nothing else is assumed: listing
may be stale or unordered and is never needed for correctness.

fsspec's portable calls do not promise exclusive creation (`pipe_file(mode="create")` let several writers win on local
files and in memory), so each store implements it with the primitive its medium really has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from storage.errors import ArtifactCorrupt, ObjectExists, ObjectMissing, PreconditionFailed

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")


class Store(Protocol):
    """Keys are relative, separated by "/". All calls block; run them in a thread beside an event loop.

    Raises, for every call: `StorageUnusable` (permission, read-only, no such place), `StoreUnavailable` (try again, not
    applied), `CommitUnknown` (a write that may or may not have been applied).
    """

    @property
    def url(self) -> str: ...

    @property
    def trouble(self) -> str:
        """Why calls under way wait, "" while they do not."""
        ...

    def patient(self, deadline_s: float) -> Store:
        """The same store, whose calls wait for an answer no longer than `deadline_s` where waiting can be bounded."""
        ...

    def create(self, key: str, data: Bytes) -> None:
        """Create `key` exclusively and durably. Raises `ObjectExists`."""
        ...

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of `key`. Raises `ObjectMissing`."""
        ...

    def size(self, key: str) -> int | None:
        """Length of `key` in bytes, or None when it does not exist."""
        ...

    def list(self, prefix: str, after: str = "") -> list[str]:
        """Keys below the folder `prefix` that come after `after` as text; as a hint: possibly stale, in no order."""
        ...

    def delete(self, keys: Iterable[str]) -> list[str]:
        """Delete keys; a missing one counts as deleted. Returns the keys that could not be deleted."""
        ...

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """Content and a token for `swap`. Raises `ObjectMissing`."""
        ...

    def swap(self, key: str, data: Bytes, token: str | None) -> str:
        """Replace the content if it is still the one of `token` (None: absent); returns the new token.

        Raises `PreconditionFailed`.
        """
        ...


class Leftover(NamedTuple):
    """What a writer that was killed left in the medium; no key leads to it. `place` is the store's own."""

    kind: str
    name: str
    size: int
    place: str = ""


@runtime_checkable
class Littered(Protocol):
    """A store in which killed writers leave something."""

    def leftovers(self, prefix: str, before: float) -> list[Leftover]:
        """Those below the folder `prefix` that were begun before the Unix time `before`."""
        ...

    def drop(self, leftovers: Iterable[Leftover]) -> list[str]:
        """Remove them; returns the names of those that could not be removed."""
        ...


def read_proven(store: Store, key: str, prove: Callable[[bytes], T]) -> T:
    """What `prove` makes of an object. A proof that fails is tried once more on bytes read again, because bits also
    flip on the wire; then its `ArtifactCorrupt` is final. Raises `ObjectMissing`."""
    try:
        return prove(store.read(key))
    except ArtifactCorrupt:
        return prove(store.read(key))


def read_named(store: Store, key: str, digest: str, what: str) -> bytes:
    """The bytes of an object, `what` the journal names with their sha256, proven. Raises `ArtifactCorrupt`."""

    def prove(data: bytes) -> bytes:
        if (actual := token_of(data)) != digest:
            raise _altered(f"{key} has sha256 {actual[:16]}…", f"sha256 {digest[:16]}…", "digest")
        return data

    try:
        return read_proven(store, key, prove)
    except ObjectMissing as error:
        raise _altered(f"{key} is missing", f"{what} that the journal names", "missing") from error


def _altered(found: str, expected: str, code: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        found,
        expected=expected,
        action="restore the object from a copy, or `tidegate fork RUN NEW --last-good`",
        code=code,
    )


def create_same(store: Store, key: str, data: Bytes) -> int:
    """Create an object; one that exists must hold the same bytes. Returns the bytes written. Raises
    `ArtifactCorrupt`."""
    try:
        store.create(key, data)
        return len(data)
    except ObjectExists:
        if token_of(store.read(key)) == token_of(data):
            return 0
    raise ArtifactCorrupt(
        f"{key} exists with other content",
        expected="the content its name promises",
        action="the object was altered; delete it if nothing you need refers to it",
        code="digest",
    )


def check_key(key: str) -> str:
    """Refuse keys that could leave the store's own place."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise ArtifactCorrupt(
            f"storage key {key!r}",
            expected="a relative key without empty, '.' or '..' parts",
            action="the object that names this key was altered; restore it from a copy",
            code="path_outside",
        )
    return key


def missing(key: str, url: str) -> ObjectMissing:
    return ObjectMissing(
        f"no object {key!r} in {url}", expected="the object to exist", action="check the storage url and the run name"
    )


def exists(key: str, url: str) -> ObjectExists:
    return ObjectExists(f"{key!r} in {url} exists", expected="a new object", action="read it back and compare")


def token_of(data: Bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def precondition(key: str) -> PreconditionFailed:
    return PreconditionFailed(f"{key!r} has changed", expected="the value last read", action="read it again")
