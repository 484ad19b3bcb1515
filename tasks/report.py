"""What a person sees in the UI while a run goes on and when it ends."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)
from prefect.logging import get_run_logger

from storage.schema import EvaluationDone
from tasks.evaluate import line as evaluation_line
from tasks.metrics import MetricsLog
from tasks.run import Opened, Resumed
from tasks.session import Session

EVERY_S = 1.0


def key_of(run: str, what: str) -> str:
    """Artifact keys are lower-case words joined by dashes."""
    return "-".join(part for part in (*"".join(c if c.isalnum() else " " for c in run.lower()).split(), what) if part)


class Progress:
    """One progress artifact per attempt, a log line now and then, at most one a second, and one per evaluation; all
    steps and evaluations go to `curves`."""

    def __init__(self, run: str, total: int, curves: MetricsLog) -> None:
        self._run, self._total, self._log = run, total, get_run_logger()
        self.curves = curves
        self._artifact: UUID | None = None
        self._last = 0.0
        self._told: dict[str, EvaluationDone] = {}

    def evaluations(self, one: Session) -> None:
        """A line for each result that has none yet."""
        for suite, done in one.evaluated.items():
            if self._told.get(suite) != done:
                self._log.info(evaluation_line(done))
                self.curves.evaluation(done)
        self._told.update(one.evaluated)

    async def step(self, step: int, one: Session, *, last: bool = False) -> None:
        self.evaluations(one)
        await self.curves.step(step, one.history[-1])
        now = time.monotonic()
        if now - self._last < EVERY_S and not last:
            return
        self._last = now
        self._log.info(line(step, self._total, shown(one)))
        percent = min(100.0, 100.0 * step / self._total)
        if self._artifact is None:
            self._artifact = await acreate_progress_artifact(
                progress=percent, key=key_of(self._run, "progress"), description=f"Steps of run {self._run}"
            )
        else:
            await aupdate_progress_artifact(artifact_id=self._artifact, progress=percent)


def shown(one: Session) -> dict[str, float]:
    """What the line of the newest step shows: its metrics, and the newest result of each suite as suite/metric."""
    found = dict(one.history[-1])
    for suite, done in one.evaluated.items():
        found |= {f"{suite}/{name}": value for name, value in done.metrics.items() if name != "tokens_mean"}
    return found


def line(step: int, total: int, metrics: dict[str, float]) -> str:
    """One line about a step."""
    short = {"reward": "reward_mean", "loss": "loss", "staleness": "staleness_mean", "tokens": "tokens_mean"}
    parts = [f"{name}={metrics[key]:.3f}" for name, key in short.items() if key in metrics]
    parts += [f"{name}={value:.3f}" for name, value in metrics.items() if "/" in name]
    return f"op=step step={step}/{total} {' '.join(parts)}"


async def resume_report(run: str, opened: Opened, resumed: Resumed) -> str:
    """How this attempt found the run, as an artifact; returns the sentence."""
    how = "kept the trainer" if resumed.warm else f"restored step {resumed.base}, redid {resumed.redone} steps"
    came = "claimed as" if opened.new else "joined"
    text = f"Run {run}: {came} incarnation {resumed.incarnation} at step {resumed.step}, driver {opened.token}: {how}."
    if opened.new and resumed.incarnation > 1:
        text += f" {opened.found}."
    if resumed.ahead:
        text += " One trained step was not committed yet; it is committed now."
    if resumed.reverted:
        text += f" {resumed.reverted} committed steps after it were taken back; their groups start again."
    if resumed.diverged:
        text += f" {resumed.diverged} redone steps came to another state than committed."
    for reason in resumed.rejected:
        text += f"\n\n* not taken: {reason}"
    await acreate_markdown_artifact(markdown=text, key=key_of(run, "resume"), description="How the run was resumed")
    return text


def reward_curve(run: str, steps: Sequence[dict[str, Any]]) -> bytes:
    """PNG of reward and staleness over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    numbers = [entry["step"] for entry in steps]
    rewards = [entry["reward_mean"] for entry in steps]
    axes[0].plot(numbers, rewards, ".-" if len(steps) < 60 else "-", color="#1f6feb", alpha=0.45, label="mean reward")
    axes[0].plot(numbers, _smooth(rewards), color="#0a3069", label="moving average")
    axes[0].set(ylabel="reward", title=f"{run}: reward over {len(steps)} steps", ylim=(-0.02, 1.02))
    axes[0].legend(loc="lower right")
    axes[1].plot(numbers, [entry["staleness_mean"] for entry in steps], color="#bc4c00")
    axes[1].set(xlabel="step", ylabel="staleness")
    for one in axes:
        one.grid(alpha=0.25)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _smooth(values: Sequence[float], keep: float = 0.8) -> list[float]:
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else keep * smooth[-1] + (1 - keep) * value)
    return smooth


async def publish_curve(run: str, png: bytes) -> None:
    """The curve as an artifact of the run."""
    await acreate_image_artifact(
        image_url=f"data:image/png;base64,{base64.b64encode(png).decode()}",
        key=key_of(run, "reward"),
        description=f"Reward of run {run}",
    )
