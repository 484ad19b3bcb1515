"""The resources of a run's environment as rollout control knows them: from which boundary an attempt can go on.

Only what is sure without asking a host is decided here; an attempt that finds out later ends as not continuable, and
starts over too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.ledger import Boundary

RESTART_ONLY = "restart_only"


@dataclass(frozen=True, slots=True)
class Topology:
    """`modes` is the checkpoint mode of each resource by name, `schemas` the schema of its exports; `episode` is the
    mode of the episodes themselves."""

    episode: str = "export_restore"
    modes: Mapping[str, str] = field(default_factory=lambda: {})
    schemas: Mapping[str, int] = field(default_factory=lambda: {})

    def why_not_continuable(self, at: Boundary) -> str:
        """Why no attempt can go on from there, or ""."""
        if self.episode == RESTART_ONLY:
            return "restart_only: the episode"
        if at.revisions is None:
            return "unknown_dependencies"
        used = {name for name, revision in at.revisions.items() if revision}
        used |= {request.resource for request in at.requests}
        for name in sorted(used):
            mode = self.modes.get(name)
            if mode is None:
                return f"resource_unknown: {name}"
            begun = any(one.resource == name and one.reply is None for one in at.requests)
            if mode == RESTART_ONLY and (at.revision(name) or begun):
                return f"restart_only: {name}"
        return ""

    def fingerprint(self) -> str:
        """Digest of what must be the same where a run goes on; "" without resources."""
        if not self.modes:
            return ""
        stated = {name: [mode, self.schemas.get(name, 1)] for name, mode in sorted(self.modes.items())}
        return hashlib.sha256(json.dumps(stated).encode()).hexdigest()


NO_RESOURCES = Topology()
