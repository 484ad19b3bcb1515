"""Who waits for what, since when, and who can satisfy it; and the circles in it that nothing but a person ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu.rollout.messages import Wait
from storage.clock import Clock


@dataclass(slots=True)
class _Waiting:
    wait: Wait
    since: float


class Waits:
    """Components of a run by name. A wait lasts while its gate stays the same, whatever its text says."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now: dict[str, _Waiting] = {}
        self._before: dict[str, float] = {}

    def note(self, component: str, wait: Wait | None) -> None:
        """The component waits for this, or goes on (None)."""
        found = self._now.get(component)
        if found is not None and (wait is None or wait.gate != found.wait.gate):
            self._count(component, self._now.pop(component))
            found = None
        if wait is not None:
            since = found.since if found else self._clock.monotonic()
            self._now[component] = _Waiting(wait, since)

    def _count(self, component: str, ended: _Waiting) -> None:
        name = f"{component}.{ended.wait.gate}"
        self._before[name] = self._before.get(name, 0.0) + self._clock.monotonic() - ended.since

    def seconds(self) -> dict[str, float]:
        """Seconds waited so far, by component and gate."""
        total = dict(self._before)
        for component, one in self._now.items():
            name = f"{component}.{one.wait.gate}"
            total[name] = total.get(name, 0.0) + self._clock.monotonic() - one.since
        return total

    def status(self) -> list[dict[str, object]]:
        now = self._clock.monotonic()
        return [
            {"component": name, "waits_for": one.wait.reason, "since_s": now - one.since, "who": one.wait.who}
            for name, one in self._now.items()
        ]

    def circle(self) -> str:
        """A circle of components that wait for each other, as a sentence; "" when there is none."""
        names = find_circle({name: one.wait.on for name, one in self._now.items()})
        return "; ".join(f"{name} waits for {self._now[name].wait.on}: {self._now[name].wait.reason}" for name in names)


def find_circle(on: Mapping[str, str]) -> list[str]:
    """The first circle of a map from each waiting component to the one it waits for."""
    for start in on:
        seen: list[str] = []
        at = start
        while at in on and at not in seen:
            seen.append(at)
            at = on[at]
        if at in seen:
            return seen[seen.index(at) :]
    return []
