"""Rollout control's figures on Ray's metrics endpoint, one gauge each, labelled with the run."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from ray.util.metrics import Gauge

EVERY_S = 5.0
PREFIX = "tidegate_"

log = logging.getLogger(__name__)


class Gauges:
    """Made on demand: which figures there are depends on what happened."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}

    def publish(self, figures: dict[str, float]) -> None:
        for figure, value in figures.items():
            name, _, part = figure.partition("/")
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = Gauge(gauge_name(name), name.replace("_", " "), ("run", "part"))
            gauge.set(value, {"run": self._run, "part": part})


def gauge_name(figure: str) -> str:
    """Prometheus allows letters, digits and underscores."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", figure)


async def publish_for_ever(run: str, ask: Callable[[], Awaitable[dict[str, float]]]) -> None:
    """Publish every few seconds as long as this process lives. A round that fails costs its figures, not the next
    round's."""
    gauges = Gauges(run)
    while True:
        try:
            gauges.publish(await ask())
        except Exception:  # figures are for looking at: whatever is wrong with them, the run goes on
            log.exception("op=metrics decision=skip_round run=%s", run)
        await asyncio.sleep(EVERY_S)
