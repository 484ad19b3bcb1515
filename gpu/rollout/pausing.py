"""Which holds keep engines paused: they go on when the last of these holds ends, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from gpu.rollout.engine_control import EngineControl
from gpu.rollout.signal import seen


class Pausing:
    """The holds under which engines were told to pause."""

    def __init__(self) -> None:
        self._holds: set[int] = set()
        self._resuming: set[asyncio.Future[Any]] = set()

    def begin(self, hold: int) -> None:
        self._holds.add(hold)

    async def ended(self, holds: Iterable[int], engines: EngineControl) -> None:
        """These holds are over. What resuming raises passes through; repeating it is harmless."""
        self._holds.difference_update(holds)
        if not self._holds:
            await engines.resume()

    def end(self, holds: Iterable[int], engines: EngineControl) -> None:
        """The same beside the caller: an engine that does not answer must not keep it waiting."""
        resuming = asyncio.ensure_future(self.ended(list(holds), engines))
        resuming.add_done_callback(seen)
        self._resuming.add(resuming)
        resuming.add_done_callback(self._resuming.discard)
