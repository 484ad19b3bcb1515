"""What a demo must have shown, judged from storage alone."""

from __future__ import annotations

from collections.abc import Sequence

from storage import schema
from storage.history import read_all
from storage.opening import open_store
from storage.verify import Report


def minted_before_redo(storage: str, run: str) -> int:
    """Attempts minted after a claim and before the last step it redid: redone steps must generate nothing."""
    count = pending = 0
    for segment in read_all(open_store(storage), run):
        for row in segment.rows:
            if isinstance(row.record, schema.RunClaimed):
                pending = 0
            elif isinstance(row.record, schema.StepRedone):
                count, pending = count + pending, 0
            else:
                pending += len(schema.minted(row.record))
    return count


def live_at_deaths(storage: str, run: str) -> int:
    """Attempts that were live, as far as the journal knew, when an incarnation ended; counted from the raw records."""
    live: set[tuple[int, int]] = set()
    total = 0
    for segment in read_all(open_store(storage), run):
        for row in segment.rows:
            record = row.record
            if isinstance(record, schema.RunClaimed):
                total += len(live)
                live.clear()
            elif isinstance(record, schema.AttemptAbandoned):
                live.discard((record.group, record.sibling))
            elif isinstance(record, schema.Sealed):
                live.difference_update(zip(record.groups, record.siblings, strict=True))
            else:
                live.update((group, sibling) for group, sibling, _ in schema.minted(record))
    return total


def judge(report: Report, rewards: Sequence[float], kills: Sequence[bool], storage: str) -> tuple[str, list[str]]:
    """The last line and what is wrong with it. `kills` says of each planned kill whether it happened."""
    window = max(1, len(rewards) // 20)
    first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    live = live_at_deaths(storage, report.run)
    line = (
        f"steps={report.steps} kills={sum(kills)} consumed={report.consumed} lost={report.lost} "
        f"trained_twice={report.trained_twice} reused={report.rollouts_reused} redone_steps={report.steps_redone} "
        f"regenerated={report.rollouts_regenerated} reward_first={first:.3f} reward_last={last:.3f}"
    )
    expected = {
        "verify found problems": report.sound,
        "both kills must have happened": all(kills),
        "prompts were lost": report.lost == 0,
        "prompts were trained twice": report.trained_twice == 0,
        "the run must be finished with everything settled": bool(report.finished) and report.unsettled == 0,
        "finished rollouts must have been reused": report.rollouts_reused > 0,
        f"more was generated again than the {live} rollouts live at the deaths": report.rollouts_regenerated <= live,
        "redone steps generated rollouts": minted_before_redo(storage, report.run) == 0,
        "the reward did not rise clearly": last > first + 0.2,
    }
    return line, [problem for problem, fine in expected.items() if not fine] + report.problems


def summary(report: Report, seconds: float) -> str:
    """The result for people."""
    return (
        f"\n{report.handed_out} prompts handed out: {report.consumed} trained once, {report.discarded} settled "
        f"untrained at the end, {report.quarantined} quarantined, {report.lost} lost.\n"
        f"{report.incarnations} incarnations; {report.rollouts_reused} finished rollouts reused, {report.steps_redone} "
        f"steps redone from the journal, {report.rollouts_regenerated} rollouts generated again.\n"
        f"Staleness at most {report.staleness_max} (bound {report.staleness_bound}), mean {report.staleness_mean:.2f}. "
        f"{seconds:.0f} s in all."
    )
