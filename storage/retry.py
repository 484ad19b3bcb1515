"""Writing an immutable object until its outcome is known."""

from __future__ import annotations

from collections.abc import Callable

from storage.errors import ArtifactCorrupt, CommitUnknown, ObjectExists, StoreUnavailable
from storage.filesystem import Bytes, Store

MAX_BACKOFF_S = 5.0


def create_until_known(store: Store, key: str, data: Bytes, sleep: Callable[[float], None]) -> int:
    """Create `key`, whose name no other writer uses; repeat while the store does not answer. Returns the tries.

    An object that exists already must be our own earlier try. Raises `ArtifactCorrupt` when it is not.
    """
    tries = 0
    while True:
        tries += 1
        try:
            store.create(key, data)
            return tries
        except ObjectExists:
            if store.read(key) == data:
                return tries
            raise ArtifactCorrupt(
                f"{key} exists with other content",
                expected="a name that only this writer uses",
                action="run verify; two writers may share a name",
            ) from None
        except (StoreUnavailable, CommitUnknown):
            sleep(min(MAX_BACKOFF_S, 0.05 * 2.0**tries))
