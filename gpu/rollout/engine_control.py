"""What rollout control needs of whoever runs the engines."""

from __future__ import annotations

from storage.ledger import Policy


class EngineControl:
    """Whoever runs engines overrides all of it and calls `RolloutManager.serve`. This one runs none, so none serves."""

    names: tuple[str, ...] = ()

    async def activate(self, policy: Policy) -> None:
        """Bring a published version to the engines; return when one serves it and no other version serves."""

    async def pause(self) -> int:
        """Wait for open model calls of engines that cannot change weights in flight; keep new ones waiting. 0."""
        return 0

    async def cancel(self) -> int:
        """Abort the open model calls of those engines; returns how many."""
        return 0

    async def resume(self) -> None: ...

    def status(self) -> dict[str, object]:
        return {}
