"""What a participant saved under a checkpoint, and whether it is still that.

A manifest names every session with its revision, size and sha256, and has a digest of its own. Everything is checked
before anything of it is used: a controller checks what it fetched, a host what it is given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import msgspec

from gpu.environments.participants.wire import Entry, Manifest
from storage.errors import ArtifactCorrupt, FingerprintMismatch


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole checkpoint: the manifests of all participants that save, and the exports that run parallel to their
    entries. `fingerprint` is of the topology it was saved under."""

    checkpoint: str
    fingerprint: str
    manifests: tuple[Manifest, ...]
    exports: tuple[tuple[bytes, ...], ...]


def entry(session: str, revision: int, data: bytes) -> Entry:
    return Entry(session=session, revision=revision, digest=hashlib.sha256(data).hexdigest(), size=len(data))


def sealed(checkpoint: str, component: str, name: str, entries: Sequence[Entry]) -> Manifest:
    """The manifest with its digest; entries by session."""
    ordered = tuple(sorted(entries, key=lambda one: one.session))
    made = Manifest(checkpoint=checkpoint, component=component, name=name, entries=ordered)
    return msgspec.structs.replace(made, digest=manifest_digest(made))


def manifest_digest(manifest: Manifest) -> str:
    """sha256 of the canonical JSON of all fields but the digest."""
    stated = msgspec.to_builtins(msgspec.structs.replace(manifest, digest=""))
    return hashlib.sha256(json.dumps(stated, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_manifest(manifest: Manifest, checkpoint: str, component: str, name: str) -> None:
    """Raises `ArtifactCorrupt` for an altered one, one of another checkpoint, or sessions that repeat, and
    `FingerprintMismatch` for one of another participant."""
    if manifest_digest(manifest) != manifest.digest:
        raise _altered(f"the manifest of {name}", manifest.digest or "no digest", manifest_digest(manifest))
    if (manifest.component, manifest.name) != (component, name):
        raise FingerprintMismatch(
            f"a manifest of {manifest.component} {manifest.name}",
            expected=f"one of {component} {name}",
            action="give every participant what it saved itself",
            code="participant",
        )
    if manifest.checkpoint != checkpoint:
        raise _altered(f"the manifest of {name}", f"checkpoint {manifest.checkpoint}", checkpoint, "mixed_cut")
    sessions = [one.session for one in manifest.entries]
    if sorted(set(sessions)) != sessions:
        raise _altered(f"the manifest of {name}", "sessions that repeat or are out of order", "each once, in order")


def check_export(stated: Entry, data: bytes) -> None:
    """Raises `ArtifactCorrupt`."""
    found = entry(stated.session, stated.revision, data)
    if found != stated:
        raise _altered(
            f"the export of session {stated.session}",
            f"{found.size} bytes with sha256 {found.digest[:12]}",
            f"{stated.size} bytes with sha256 {stated.digest[:12]}",
        )


def check_participants(manifests: Sequence[Manifest], expected: Mapping[str, str]) -> None:
    """`expected` is the component of each participant that saves, by name. Raises `FingerprintMismatch`."""
    found = sorted((one.name, one.component) for one in manifests)
    if found != sorted(expected.items()):
        raise FingerprintMismatch(
            f"a checkpoint of {', '.join(name for name, _ in found) or 'nobody'}",
            expected=f"one of {', '.join(sorted(expected)) or 'nobody'}, each once",
            action="restore onto the participants that were saved",
            code="participant_set",
        )


def _altered(what: str, found: str, expected: str, code: str = "") -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"{what} has {found}", expected=expected, action="use another checkpoint; this one was altered", code=code
    )
