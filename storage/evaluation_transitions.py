"""Transitions of evaluations: due once, done once. See `storage.transitions`."""

from __future__ import annotations

import math

from storage import schema
from storage.ledger import UNKNOWN_VERSION, Ledger
from storage.rollout_transitions import illegal


def evaluation_due(ledger: Ledger, seq: int, record: schema.EvaluationDue) -> None:
    if record.step != ledger.step or not record.step:
        raise illegal(record, seq, f"evaluation of step {record.step}", f"step {ledger.step}, committed last")
    if not record.suites or len(set(record.suites)) != len(record.suites):
        raise illegal(record, seq, f"suites {record.suites}", "distinct suites")
    keys = [(suite, record.step) for suite in record.suites]
    known = [key for key in keys if key in ledger.due or key in ledger.evaluated]
    if known:
        raise illegal(record, seq, f"{known[0]} again", "each evaluation of a suite and step once")
    ledger.due.update(dict.fromkeys(keys))


def evaluation_done(ledger: Ledger, seq: int, record: schema.EvaluationDone) -> None:
    key = (record.suite, record.step)
    if key not in ledger.due:
        found = "done already" if key in ledger.evaluated else "never due"
        raise illegal(record, seq, f"{key}, {found}", "an evaluation that is due")
    if not 0 <= record.failed <= record.samples or record.tasks < 0:
        raise illegal(record, seq, f"{record.failed} of {record.samples} samples failed", "counts")
    _check_versions(ledger, seq, record)
    wrong = [name for name, value in record.metrics.items() if not math.isfinite(value)]
    if wrong:
        raise illegal(record, seq, f"{wrong[0]} = {record.metrics[wrong[0]]}", "finite metrics")
    del ledger.due[key]
    ledger.evaluated.add(key)


def _check_versions(ledger: Ledger, seq: int, record: schema.EvaluationDone) -> None:
    versions = (record.oldest, record.newest)
    newest = ledger.policy.number if ledger.policy else UNKNOWN_VERSION
    measured = record.samples > record.failed
    fits = 0 <= record.oldest <= record.newest <= newest if measured else versions == (UNKNOWN_VERSION,) * 2
    if not fits:
        raise illegal(record, seq, f"versions {versions}", f"published ones up to {newest}, -1 without any reward")
    if record.mixed != (measured and versions != (record.step, record.step)):
        raise illegal(record, seq, f"mixed={record.mixed} of versions {versions}", f"whether it was not {record.step}")
