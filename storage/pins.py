"""Pins: who reads a checkpoint for long says so in the run's folder, so that its retention waits.

A pin alone promises nothing: whoever made one checks afterwards that the checkpoint has not been retired meanwhile, and
proves what it reads. One that its owner left behind counts until it is too old.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Generator

import msgspec

from storage.clock import Clock
from storage.errors import ObjectMissing, StorageUnusable, StoreError
from storage.filesystem import Store
from storage.runs import RunPaths

log = logging.getLogger(__name__)


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`owner` is for people; `created` is Unix seconds."""

    manifest: str
    owner: str
    created: float


def pin(store: Store, run: str, manifest: str, owner: str, clock: Clock) -> str:
    """Pin a checkpoint of `run`; returns the pin's key. Raises the store's errors."""
    key = RunPaths(run).pin(manifest, uuid.uuid4().hex)
    store.create(key, msgspec.json.encode(Pin(manifest, owner, clock.wall())))
    return key


def unpin(store: Store, run: str, key: str) -> None:
    """A pin that cannot be deleted is a line in the log: it grows old."""
    try:
        reason = "not deleted" if store.delete([key]) else ""
    except (StoreError, StorageUnusable) as error:
        reason = str(error)
    if reason:
        log.warning("op=unpin run=%s key=%s decision=let_it_grow_old reason=%s", run, key, reason)


def pinned(store: Store, run: str, clock: Clock, max_age_s: float) -> set[str]:
    """Names of the manifests that somebody has pinned within `max_age_s` seconds. A pin that cannot be read counts."""
    keys = store.list(RunPaths(run).pins)
    return {key.rpartition("/")[2].rsplit(".", 2)[0] for key in keys if counts(store, key, clock, max_age_s)}


def counts(store: Store, key: str, clock: Clock, max_age_s: float) -> bool:
    """Whether a pin that was listed holds anything up."""
    try:
        created = msgspec.json.decode(store.read(key), type=Pin).created
    except ObjectMissing:
        return False  # unpinned meanwhile
    except msgspec.DecodeError as error:
        log.warning("op=pinned key=%s decision=counts reason=%s", key, error)
        return True
    return clock.wall() - created <= max_age_s


@contextlib.contextmanager
def holding(store: Store, run: str, manifest: str, owner: str, clock: Clock) -> Generator[None]:
    """Pin a checkpoint while it is read. Of a store that takes no pin it is read all the same: what is missing then is
    found out when it is proven."""
    key = ""
    try:
        key = pin(store, run, manifest, owner, clock)
    except StorageUnusable as error:
        log.warning("op=pin run=%s manifest=%s decision=read_without reason=%s", run, manifest, error)
    try:
        yield
    finally:
        if key:
            unpin(store, run, key)
