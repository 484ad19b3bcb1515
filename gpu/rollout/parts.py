"""What every group of a manager's calls works on."""

from __future__ import annotations

from gpu.rollout.archiving import Archiving
from gpu.rollout.calls import Callers
from gpu.rollout.committer import Committer
from gpu.rollout.control import RolloutControl
from gpu.rollout.engine_control import EngineControl
from gpu.rollout.retaining import Retaining
from gpu.rollout.signal import Signal
from gpu.rollout.waits import Waits
from gpu.rollout.watchdog import Watchdog
from storage.clock import Clock
from storage.runs import RunInfo


class ManagerParts:
    """Set by `RolloutManager`, used by the classes of calls that it consists of."""

    control: RolloutControl
    callers: Callers
    changed: Signal
    waits: Waits
    engines: EngineControl
    info: RunInfo
    committer: Committer
    watchdog: Watchdog
    archiving: Archiving
    retaining: Retaining
    _clock: Clock
    _lost_workers: set[str]
    """Whose calls, if any still wait, get nothing."""

    async def _durable(self, seq: int, what: str) -> None:
        raise NotImplementedError
