"""What a participant says that it can do, and whether a set of them can be saved as it is.

Asked at set-up, never guessed. The fingerprint covers what must be the same where a checkpoint is restored: not the
process that answers, and not the features, which may grow.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from gpu.environments.base import CheckpointMode
from gpu.environments.participants.wire import SCHEMA, Answer, Id
from storage.errors import ConfigurationRefused, FingerprintMismatch, SchemaUnsupported


class Component(Enum):
    """The role of a participant. In the order in which they are prepared."""

    MODEL = "model"
    AGENT = "agent"
    RESOURCE = "resource"


CONTROL = "checkpoint_control"
"""Prepare, commit, restore, resume, abort, status."""
RECEIPTS = "completion_receipts"
"""Keeps completed results until they are acknowledged."""
DEPENDENCIES = "resource_dependencies"
"""Says which resources a continuation depends on."""
DISCARD = "discard_continuation"
"""Drops one continuation and keeps the others."""


class Capabilities(Answer, frozen=True, kw_only=True):
    """`replayable`: see `ResourceHost`. `instance` is the process that answered."""

    component: Component
    name: Id
    checkpoint_mode: CheckpointMode
    features: tuple[str, ...] = ()
    replayable: bool = False

    @property
    def saves(self) -> bool:
        return self.checkpoint_mode is CheckpointMode.EXPORT_RESTORE


def check_topology(records: Sequence[Capabilities]) -> str:
    """The fingerprint of a set that can be saved. Raises `SchemaUnsupported`, and `ConfigurationRefused` with the code
    `duplicate`, `agent_mode` or `feature`."""
    for one in records:
        if one.schema_version != SCHEMA:
            raise SchemaUnsupported(
                f"{one.component.value} {one.name} speaks schema {one.schema_version}",
                expected=f"schema {SCHEMA}, the only supported one",
                action="use versions of it and of Tidegate that fit",
            )
    repeated = sorted(name for name, count in Counter(one.name for one in records).items() if count > 1)
    if repeated:
        raise ConfigurationRefused(
            f"{', '.join(repeated)} more than once",
            expected="a name of its own for every participant",
            action="rename one of them",
            code="duplicate",
        )
    restarts = sorted(one.name for one in records if one.checkpoint_mode is CheckpointMode.RESTART_ONLY)
    for one in records:
        _check_mode(one)
        _check_features(one, restarts)
    return fingerprint(records)


def fingerprint(records: Sequence[Capabilities]) -> str:
    """sha256 of the sorted contracts."""
    stated = sorted(
        [one.component.value, one.name, one.schema_version, one.checkpoint_mode.value, one.replayable]
        for one in records
    )
    return hashlib.sha256(json.dumps(stated, separators=(",", ":")).encode()).hexdigest()


def check_same(saved: str, records: Sequence[Capabilities]) -> None:
    """Before a restore. Raises `FingerprintMismatch`."""
    found = check_topology(records)
    if found != saved:
        names = ", ".join(f"{one.component.value} {one.name}" for one in records)
        raise FingerprintMismatch(
            f"participants {names} with fingerprint {found[:12]}",
            expected=f"those of the checkpoint, with fingerprint {saved[:12]}",
            action="restore with the participants, modes and names that were saved",
            code="topology",
        )


def _check_mode(one: Capabilities) -> None:
    if one.component is Component.AGENT and not one.saves:
        raise ConfigurationRefused(
            f"agent {one.name} is {one.checkpoint_mode.value}",
            expected="every agent in mode export_restore: it holds the rollouts themselves",
            action="let the agent export its sessions, or take another",
            code="agent_mode",
        )


def _check_features(one: Capabilities, restarts: Sequence[str]) -> None:
    wanted = [CONTROL] if one.saves else []
    if one.component is Component.AGENT:
        wanted += [RECEIPTS, *((DEPENDENCIES, DISCARD) if restarts else ())]
    missing = [name for name in wanted if name not in one.features]
    if missing:
        because = f", beside {', '.join(restarts)} that can only start over" if DEPENDENCIES in missing else ""
        raise ConfigurationRefused(
            f"{one.component.value} {one.name} without {', '.join(missing)}{because}",
            expected=f"the features {', '.join(wanted)}",
            action="use a participant that has them",
            code="feature",
        )
