"""Writing an immutable object until its outcome is known."""

from __future__ import annotations

import logging
from collections.abc import Callable

from storage.errors import ArtifactCorrupt, CommitUnknown, ObjectExists, StoreUnavailable
from storage.filesystem import Bytes, Store

MAX_BACKOFF_S = 5.0

log = logging.getLogger(__name__)


def until_known(what: str, write: Callable[[], None], sleep: Callable[[float], None]) -> int:
    """Repeat `write` while the store does not answer, and say so; returns the tries. What else it raises passes."""
    tries = 0
    while True:
        tries += 1
        try:
            write()
            return tries
        except (StoreUnavailable, CommitUnknown) as error:
            wait = min(MAX_BACKOFF_S, 0.05 * 2.0**tries)
            log.warning("op=write what=%s tries=%d decision=again_in_%.1fs reason=%s", what, tries, wait, error)
            sleep(wait)


def create_until_known(store: Store, key: str, data: Bytes, sleep: Callable[[float], None]) -> int:
    """Create `key`, whose name no other writer uses; repeat while the store does not answer. Returns the tries.

    An object that exists already must be our own earlier try. Raises `ArtifactCorrupt` when it is not.
    """

    def create() -> None:
        try:
            store.create(key, data)
        except ObjectExists:
            if store.read(key) != data:
                raise ArtifactCorrupt(
                    f"{key} exists with other content",
                    expected="a name that only this writer uses",
                    action="run verify; two writers may share a name",
                ) from None

    return until_known(key, create, sleep)
