"""Rollout control: everything handed out comes back exactly once.

One object per incarnation, pure and synchronous. It owns reservations, attempts, admission, buffer and leases; every
change goes through the journal it was given. Whoever wraps it (the manager actor, a simulation) stores what the journal
froze, calls `durable` and `tick`, and waits; nothing here waits, reads a clock by itself, or knows a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu.rollout.admission import Admission
from gpu.rollout.books import Books
from gpu.rollout.evaluation import Evaluations, Suite
from gpu.rollout.leasing import Leasing
from gpu.rollout.limits import Limits
from gpu.rollout.messages import Accepted, Dispatch, Found, Grant, Hold, Identity, Outcome, PlainEnded, Report, Wait
from gpu.rollout.plain import Plain
from gpu.rollout.results import GroupFilter, Results, keep_all
from gpu.rollout.scheduler import Scheduler
from gpu.rollout.topology import NO_RESOURCES, Topology
from storage import schema
from storage.clock import Clock
from storage.errors import AckMismatch, HoldRefused, LeaseRefused, LedgerInvalid
from storage.journal import JournalWriter
from storage.ledger import GENERATING, RESERVED, SEALED, UNKNOWN_VERSION, WAITING, Group, Ledger, Recipe, Rollout
from storage.quarantine import check_release
from storage.retention import Retention, plan


class RolloutControl:
    """`length` is the number of ordinals of the source, None when endless; `group_filter` judges finished groups, at
    once, or with `judged_outside` wherever the wrapper runs it (`results.begin_judging`, `judge`, `judging_failed`);
    `suites` are evaluated; what a `retention` does not keep is retired with each checkpoint, without one nothing
    is."""

    def __init__(
        self,
        ledger: Ledger,
        journal: JournalWriter,
        limits: Limits,
        clock: Clock,
        *,
        length: int | None,
        group_filter: GroupFilter = keep_all,
        judged_outside: bool = False,
        suites: Sequence[Suite] = (),
        retention: Retention | None = None,
        topology: Topology = NO_RESOURCES,
    ) -> None:
        ledger.spent_files = {} if retention is not None and retention.payload == "needed" else None
        self.books = Books(ledger, journal, clock, limits.max_hot_bytes)
        self.limits, self._retention = limits, retention
        self.found = Found()
        self.admission = Admission(clock)
        self.plain = Plain(limits, ledger.incarnation, self._plain_ended)
        self.scheduler = Scheduler(self.books, limits, self.admission, length, self.plain, topology)
        self.results = Results(
            self.books, limits, self.admission, self.scheduler, None if judged_outside else group_filter
        )
        self.leasing = Leasing(self.books, limits, self.admission, self.scheduler, self.results)
        self.evaluations = Evaluations(self.books, limits, self.plain, suites)
        if ledger.finished:
            self.admission.close(ledger.finished)
        else:
            self.results.quarantine_spent()

    @property
    def ledger(self) -> Ledger:
        return self.books.ledger

    # ------------------------------------------------------------------ workers

    def take(self, worker: str, limit: int) -> list[Dispatch]:
        """Attempts for a worker that has room for `limit` more."""
        return self.scheduler.take(worker, limit)

    def report(self, report: Report) -> Accepted:
        """Finished turns and ended attempts of a worker."""
        accepted = self.results.report(report)
        if report.plain:
            plain = sum(self.plain.end(ended, self._newest) for ended in report.plain)
            self.evaluations.collect()
            ignored = accepted.ignored + len(report.plain) - plain
            return Accepted(accepted.accepted + plain, ignored, accepted.seq, accepted.over)
        return accepted

    @property
    def _newest(self) -> int:
        """The newest published version."""
        return self.ledger.policy.number if self.ledger.policy is not None else UNKNOWN_VERSION

    def _plain_ended(self, identity: Identity) -> None:
        self.scheduler.ended(identity)
        self.admission.ended([identity])

    def abandon(self, identity: Identity, outcome: Outcome, detail: str) -> None:
        """An execution ended without a result, owned or plain."""
        if identity.group >= 0:
            self.results.abandon(identity, outcome, detail)
        else:
            self.plain.end(PlainEnded(identity, outcome, detail=detail), self._newest)
            self.evaluations.collect()

    def lose_worker(self, worker: str) -> int:
        """A worker process is gone: its attempts end, theirs are tried again elsewhere. Returns how many."""
        lost = self.scheduler.of_worker(worker)
        for identity in lost:
            self.abandon(identity, Outcome.WORKER_LOST, f"worker {worker} died")
        return len(lost)

    # ------------------------------------------------------------------ recovery

    def declare(self, recipe: Recipe) -> int:
        """This incarnation's recipe. Groups that are unfinished and may not be recovered sibling by sibling start whole
        again; returns how many. Turns from which nothing can go on are given up. Call it before anything is
        dispatched."""
        if self.ledger.finished:
            return 0
        if recipe != self.ledger.recipe:
            self.books.record(schema.RecipeDeclared(recipe.recovery, recipe.fingerprint))
        whole = [group for group in self.ledger.groups.values() if _redone_whole(group, recipe)]
        for group in whole:
            changed = group.recipe.fingerprint != recipe.fingerprint
            self.leasing.requeue(group.ordinal, "recipe_changed" if changed else "prompt_group")
        given_up, restarted = 0, self._rollouts(lambda one: one.closed_by_claim and one.boundary is None)
        for group in self.ledger.groups.values():
            waiting = [at for at, one in enumerate(group.rollouts) if one.state is WAITING]
            given_up += self.scheduler.give_up(group, waiting)
        self.check_conservation()
        finished = self._rollouts(lambda one: one.state is SEALED)
        continued = self._rollouts(lambda one: one.state is WAITING and one.boundary is not None)
        self.found = Found(finished, continued, restarted, given_up, len(whole))
        return len(whole)

    def _rollouts(self, which: Callable[[Rollout], bool]) -> int:
        return sum(which(one) for group in self.ledger.groups.values() for one in group.rollouts)

    # ------------------------------------------------------------------ policy versions

    def publish_policy(self, digest: str) -> int:
        """Record the weights after the last committed step as this incarnation's version of that number. Idempotent."""
        ledger = self.ledger
        now = ledger.policy
        if now is not None and (now.incarnation, now.number, now.digest) == (ledger.incarnation, ledger.step, digest):
            return self.books.journal.last_seq
        parent = now.digest if now else ""
        return self.books.record(schema.PolicyPublished(ledger.incarnation, ledger.step, digest, parent))

    def serve(self, number: int | None) -> None:
        """Every serving engine has confirmed version `number`; None: no engine serves."""
        policy, step = self.ledger.policy, self.ledger.step  # a policy beyond the step was reverted
        if number is not None and (policy is None or number > min(policy.number, step)):
            raise LedgerInvalid(
                f"engines serve version {number}",
                expected="a published version",
                action="publish the policy before engines activate it",
                code="version_unknown",
            )
        self.scheduler.version = number
        if policy is not None and number == policy.number:
            self.evaluations.serve(policy)

    # ------------------------------------------------------------------ trainer

    def try_lease(self) -> Grant | Wait | None:
        return self.leasing.try_lease()

    def redone(self, step: int, state_digest: str, weights_digest: str) -> bool:
        """A committed step was trained again after a restore; returns whether the digests agree."""
        matches = self.ledger.steps[step].state_digest == state_digest if step in self.ledger.steps else False
        self.books.record(schema.StepRedone(step, state_digest, weights_digest, matches))
        return matches

    def revert(self, to_step: int, state_digest: str, weights_digest: str) -> int:
        """The trainer was restored to `to_step` and will not redo what was committed after it. Returns the sequence
        number to wait for; idempotent. Raises `LedgerInvalid` once this incarnation has begun anything."""
        ledger = self.ledger
        if ledger.step == to_step:
            return self.books.journal.last_seq
        if ledger.lease is not None:
            self.leasing.roll_back(ledger.lease.lease, "reverted")
        for group in ledger.groups.values():
            if group.state is GENERATING:
                self.results.judging.drop(group.ordinal)
        seq = self.books.record(schema.StepsReverted(ledger.step, to_step, state_digest, weights_digest))
        self.evaluations.revert(to_step)
        for ordinal in ledger.groups:
            self.scheduler.waits(ordinal)
        return seq

    def publish_checkpoint(self, step: int, manifest: str, digest: str, size: int, written: int) -> int:
        """The checkpoint of a committed step is complete in the store; others lose their meaning. Idempotent by
        step."""
        if any(found.step >= step for found in self.ledger.checkpoints):
            return self.books.journal.last_seq
        position = self.ledger.steps[step].seq if step in self.ledger.steps else -1
        self.books.record(schema.CheckpointPublished(step, position, manifest, digest, size, written))
        return self._retire()

    def _retire(self) -> int:
        """Returns the sequence number to wait for."""
        spent = self.ledger.spent_files or {}
        planned = plan(self.ledger, self._retention, spent) if self._retention else None
        if planned is not None:
            self.books.record(planned)
            for name in planned.blocks:
                del spent[name]
        return self.books.journal.last_seq

    # ------------------------------------------------------------------ quarantine

    def quarantined(self) -> dict[int, str]:
        """Groups that spent their attempt budget, and why."""
        return {ordinal: found.reason for ordinal, found in sorted(self.ledger.quarantined.items())}

    def release_quarantined(self, ordinals: Sequence[int]) -> int:
        """Give these groups another budget; returns the sequence number to wait for. All or none: raises
        `QuarantineRefused` for one that is not quarantined."""
        check_release(self.ledger, ordinals)
        for ordinal in dict.fromkeys(ordinals):
            self.books.record(schema.QuarantineReleased(ordinal))
            self.scheduler.waits(ordinal)
        return self.books.journal.last_seq

    # ------------------------------------------------------------------ holds

    def acquire(self, owner: str, purpose: str, token: int, ttl_s: float) -> Hold:
        active = set(self.scheduler.active)
        for _, identities in self.results.unpublished:
            active.update(identities)
        return self.admission.acquire(owner, purpose, token, ttl_s, active)

    def prepare_checkpoint(self, hold: int, epoch: int) -> None:
        """A checkpoint may be captured now: an active hold, no open lease. Raises `HoldRefused`."""
        self.admission.confirm(hold, epoch)
        self.results.retry_judging()
        if self.ledger.lease is not None:
            raise HoldRefused(
                f"lease {self.ledger.lease.lease} is open",
                expected="no open lease",
                action="commit or roll back the step first",
                code="lease_open",
            )

    # ------------------------------------------------------------------ life

    def durable(self, seq: int) -> None:
        """Records up to `seq` are durable: what they completed or rolled back is in the buffer now, within its cap."""
        self.results.durable(seq)
        self.leasing.evict()

    def tick(self) -> None:
        """Let time pass: verdicts that are due again."""
        self.results.judge_due()

    def expire(self) -> list[Hold]:
        """Release the holds whose owner stopped renewing, when nothing runs under them; returns them."""
        late = self.admission.late()
        for hold in late:
            self.admission.release(hold.hold)
        return late

    def finish(self, reason: str) -> int:
        """The run is complete: settle what is left untrained, close for good. Idempotent. Raises `LeaseRefused`, and
        `AckMismatch` while a host waits for an acknowledgement."""
        if self.ledger.finished:
            return self.books.journal.last_seq
        if self.ledger.lease is not None:
            raise LeaseRefused(
                f"lease {self.ledger.lease.lease} is open",
                expected="no open lease",
                action="commit or roll back the last step, then finish",
            )
        if owed := self.results.acknowledging.owed:
            raise AckMismatch(
                f"{owed} results that hosts keep are not acknowledged: {self.results.acknowledging.status()}",
                expected="none at the end of a run",
                action="bring the host back; or, if its process is gone for good, `tidegate hosts gone RUN HOST BOOT`",
                code="owed",
            )
        self.admission.close(reason)
        self.evaluations.settle()
        if self.ledger.groups:
            self.results.discard(list(self.ledger.groups), "run_finished")
        return self.books.record(schema.RunFinished(reason))

    def check_conservation(self) -> None:
        """Every ordinal is in exactly one place. Cheap: counts only. Raises `LedgerInvalid`."""
        ledger = self.ledger
        settled = len(ledger.consumed) + len(ledger.discarded) + len(ledger.quarantined)
        if settled + ledger.retained != ledger.frontier or sum(ledger.totals.values()) != ledger.retained:
            raise LedgerInvalid(
                f"{settled} settled and {ledger.retained} unsettled groups ({ledger.state_counts()})",
                expected=f"{ledger.frontier} ordinals handed out",
                action="report this as a bug",
                code="conservation",
            )

    def status(self) -> dict[str, object]:
        """Counts, and for each component what it waits for."""
        ledger = self.ledger
        return {
            "incarnation": ledger.incarnation,
            "step": ledger.step,
            "frontier": ledger.frontier,
            "groups": ledger.state_counts(),
            "live": ledger.live,
            "consumed": len(ledger.consumed),
            "discarded": len(ledger.discarded),
            "quarantined": len(ledger.quarantined),
            "backoff": len(self.scheduler.backoff),
            "serving_version": self.scheduler.version,
            "open_lease": ledger.lease.lease if ledger.lease else None,
            "checkpoint": ledger.checkpoints[-1].step if ledger.checkpoints else 0,
            "finished": ledger.finished,
            "holds": self.admission.status(),
            "ignored": dict(self.results.ignored),
            "ignored_plain": dict(self.plain.ignored),
            "live_plain": self.plain.live,
            "evaluations": self.evaluations.status(),
            "spilled_blocks": self.books.hot.spilled,
            "acknowledgements": self.results.acknowledging.status(),
            "group_level_work": self.results.judging.status(self.books.clock.monotonic()),
            "submission_waits_for": idle.reason if (idle := self.scheduler.why_idle()) else "",
            "counts": dict(ledger.counts),
        }


def _redone_whole(group: Group, recipe: Recipe) -> bool:
    """Whether an unfinished group has work that its recovery drops."""
    begun = group.dispatched and any(rollout.rows for rollout in group.rollouts)
    if not begun or group.state is not RESERVED:
        return False
    return group.recipe.recovery == "prompt_group" or group.recipe.fingerprint != recipe.fingerprint
