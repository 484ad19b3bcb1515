"""The figures of rollout control, flat, for TensorBoard and Ray's metrics endpoint.

Counts are of groups unless a name says otherwise, times seconds. `…_total` only grows within an incarnation; what comes
from the journal (requeues, attempts, tokens) counts over the life of the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu.rollout.control import RolloutControl
from gpu.rollout.waits import Waits

FROM_JOURNAL = ("requeued_", "discarded_", "abandoned_")


def figures(control: RolloutControl, waits: Waits) -> dict[str, float]:
    ledger, counts = control.ledger, control.ledger.counts
    handed_out = max(1, ledger.frontier) * ledger.num_siblings
    found: dict[str, float] = {f"groups_{state}": count for state, count in ledger.state_counts().items()}
    found |= {
        "groups_consumed": len(ledger.consumed),
        "groups_discarded": len(ledger.discarded),
        "groups_quarantined": len(ledger.quarantined),
        "groups_replay": control.scheduler.num_waiting,
        "groups_in_backoff": len(control.scheduler.backoff),
        "groups_judging": len(control.results.judging),
        "settlements_pending": control.results.judging.num_failed,
        "rollouts_live": ledger.live,
        "attempts_per_rollout": counts["rollouts_minted"] / handed_out,
        "tokens_generated_total": counts["tokens_sealed"],
        "tokens_wasted_total": counts["tokens_wasted"],
        "results_ignored_total": sum(control.results.ignored.values()),
        "oldest_group_s": control.scheduler.oldest_age(),
        "undurable_s": control.books.journal.undurable_age(),
        "spilled_blocks_total": control.books.hot.spilled,
        "hot_bytes": control.books.hot.num_bytes,
    }
    found |= {"rollouts_live_plain": control.plain.live, "evaluations_running": len(ledger.due)}
    found |= {f"{name}_total": n for name, n in counts.items() if name.startswith(FROM_JOURNAL)}
    found |= {f"hold_s_total/{owner}": seconds for owner, seconds in control.admission.held_seconds.items()}
    found |= {f"wait_s_total/{gate}": seconds for gate, seconds in waits.seconds().items()}
    found |= _histogram("staleness_buffered", control.leasing.buffered_staleness())
    return found | _histogram("staleness_consumed", control.leasing.staleness)


def _histogram(name: str, counted: Mapping[int, int]) -> dict[str, float]:
    """Mean, maximum, and a count per value."""
    total = sum(counted.values())
    if not total:
        return {}
    mean = sum(value * count for value, count in counted.items()) / total
    return {f"{name}_mean": mean, f"{name}_max": max(counted)} | {f"{name}/{v}": n for v, n in sorted(counted.items())}
