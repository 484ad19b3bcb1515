"""What happens to the end of an attempt: seal, retry with backoff, quarantine, or nothing because it came too late.

A report is validated member by member against the current attempts; members of older attempts, of other incarnations
and repeats are counted and change nothing. A failure is never a reward of 0.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import cast

from msgspec.structs import replace

from gpu.rollout.acknowledging import Acknowledging
from gpu.rollout.admission import Admission
from gpu.rollout.books import Books
from gpu.rollout.judging import Judging
from gpu.rollout.limits import Limits
from gpu.rollout.messages import Accepted, Ended, Identity, Outcome, Report
from gpu.rollout.progress import Applied, apply_progress, first_version, version_problem
from gpu.rollout.scheduler import Scheduler, spent
from storage import schema
from storage.errors import ContinuationInvalid, TwoOwners
from storage.ledger import GENERATING, LIVE, RESERVED, SEALED, UNKNOWN_VERSION, Boundary, Group, Rollout, next_samples
from storage.obligation_transitions import Misfit, receipts_misfit
from storage.rollout_transitions import SIBLING_ENDED

_SEALED = Outcome.SEALED

GroupFilter = Callable[[Sequence[float]], str]
"""Rewards of a group's siblings -> reason to discard the group, or "" to keep it."""


def keep_all(rewards: Sequence[float]) -> str:
    """The filter that discards nothing."""
    return ""


def zero_variance(rewards: Sequence[float]) -> str:
    """Dynamic sampling of DAPO (arXiv 2503.14476): a group whose rewards are all equal carries no gradient."""
    return "zero_variance" if len(set(rewards)) == 1 else ""


def verdict(work: GroupFilter, rewards: Sequence[float]) -> str:
    """What the work says. Raises what it raises, and `TypeError` when it says anything but a text."""
    reason = cast("object", work(rewards))
    if not isinstance(reason, str):
        raise TypeError(f"the filter returned {reason!r}; expected a reason to discard the group, or an empty text")
    return reason


class Results:
    """Applies reports. `unpublished` are sealed attempts, by the sequence number of their record, that are not durable
    yet: their executions have not ended, so a hold taken now still waits for them."""

    def __init__(
        self, books: Books, limits: Limits, admission: Admission, scheduler: Scheduler, group_filter: GroupFilter | None
    ) -> None:
        self._books, self._limits = books, limits
        self._admission, self._scheduler, self._filter = admission, scheduler, group_filter
        self.judging = Judging(limits.backoff_base_s, limits.backoff_max_s, limits.max_postprocessing)
        for group in books.ledger.groups.values():
            if group.state is GENERATING and group.num_sealed == len(group.rollouts):
                self.judging.add(group.ordinal)
        self.acknowledging = Acknowledging(books)
        self.unpublished: deque[tuple[int, list[Identity]]] = deque()
        self.ignored: Counter[str] = Counter()

    def report(self, report: Report) -> Accepted:
        """Apply a report; repeating it changes nothing. Raises `TwoOwners` for a block of another content."""
        applied = apply_progress(self._books, report, self._current, self._use_block, self.ignored)
        sealed, failed = self._sort(report, applied)
        if sealed:
            self._use_block(report)
            self._seal(report.block, sealed)
        for ended in failed:
            self.abandon(ended.identity, ended.outcome, ended.detail)
        accepted = applied.accepted + len(sealed) + len(failed)
        over = tuple(applied.over)
        return Accepted(accepted, len(report.turns) + len(report.ended) - accepted, self._books.journal.last_seq, over)

    # ------------------------------------------------------------------ which members count

    def _sort(self, report: Report, applied: Applied) -> tuple[list[Ended], list[Ended]]:
        """Attempts to seal, attempts that failed."""
        sealed: list[Ended] = []
        failed = list(applied.failed)
        # Kept only where parts of one report can speak for the same thing.
        seen, rows = applied.spoken, applied.rows
        policy = self._books.ledger.policy
        newest = policy.number if policy is not None else UNKNOWN_VERSION
        groups, last = self._books.ledger.groups, self._limits.num_siblings - 1
        entangled = bool(report.turns) or _repeats(report.ended)
        taken = False
        for ended in report.ended:
            identity = ended.identity
            # As `_current`, without the call: this loop is most of what a rollout costs here.
            group = groups.get(identity.group)
            rollout = group.rollouts[identity.sibling] if group is not None and 0 <= identity.sibling <= last else None
            if (
                rollout is None
                or rollout.state is not LIVE
                or rollout.attempt != identity.attempt
                or rollout.incarnation != identity.incarnation
                or (entangled and id(rollout) in seen)
            ):
                self.ignored[ended.outcome.value] += 1
                continue
            latest = rollout.boundary
            first = rollout.minted_version if latest is None or not latest.pending else rollout.oldest
            if entangled:
                seen.add(id(rollout))
                taken = ended.row in rows
            if ended.outcome is not _SEALED:
                failed.append(ended)
            elif (
                taken
                or ended.row < 0
                or ended.tokens < 1
                or not first <= ended.oldest <= newest
                or not isfinite(ended.reward)
                or (ended.samples != 1 if latest is None else not _fits(ended, latest))
                or (ended.receipts and _receipts_misfit(ended) is not None)
            ):
                problem = f"row {ended.row} is another's" if taken else _problem(ended, rollout, newest)
                failed.append(Ended(identity, Outcome.MALFORMED, detail=problem))
            else:
                if entangled:
                    rows.add(ended.row)
                sealed.append(ended)
        return sealed, failed

    def _current(self, identity: Identity) -> Rollout | None:
        """The rollout whose live attempt is exactly this one."""
        group = self._books.ledger.groups.get(identity.group)
        if group is None or not 0 <= identity.sibling < len(group.rollouts):
            return None
        rollout = group.rollouts[identity.sibling]
        if (
            rollout.state is LIVE
            and rollout.attempt == identity.attempt
            and rollout.incarnation == identity.incarnation
        ):
            return rollout
        return None

    # ------------------------------------------------------------------ what they do

    def _use_block(self, report: Report) -> None:
        """The rows of the report's block are about to be named. Raises `TwoOwners`: a name stands for one content."""
        known = self._books.ledger.blocks.get(report.block)
        if known is not None and known.digest != report.digest:
            raise TwoOwners(
                f"worker {report.worker} reports block {report.block!r} with digest {report.digest[:12]}",
                expected=f"digest {known.digest[:12]}, as it is stored",
                action="two workers use one name; stop both and run verify",
                code="token_row",
            )
        if known is not None:
            return
        inline = report.inline is not None
        stored = schema.PayloadStored(report.block, report.digest, report.size, inline, report.batches)
        self._books.record(stored, report.inline)
        if report.inline is not None:
            self._books.hot.put(report.block, report.inline)

    def _seal(self, block: str, sealed: list[Ended]) -> None:
        identities = [ended.identity for ended in sealed]
        ordinals = tuple([identity.group for identity in identities])
        record = schema.Sealed(
            block,
            ordinals,
            tuple([identity.sibling for identity in identities]),
            tuple([identity.attempt for identity in identities]),
            tuple([ended.row for ended in sealed]),
            tuple([ended.samples for ended in sealed]),
            tuple([ended.tokens for ended in sealed]),
            tuple([ended.oldest for ended in sealed]),
            tuple([ended.reward for ended in sealed]),
            _receipts(sealed),
        )
        seq = self._books.record(record)
        if record.receipts:
            self.acknowledging.owe(seq, record)
        self._scheduler.published(identities)
        self.unpublished.append((seq, identities))
        groups = self._books.ledger.groups
        touched = [groups[ordinal] for ordinal in dict.fromkeys(ordinals)]
        self._complete([group for group in touched if group.num_sealed == len(group.rollouts)])
        for group in touched:
            if group.state is RESERVED:
                self._quarantine_if_spent(group)

    def _complete(self, groups: list[Group]) -> None:
        """Put-time verdict: a finished group is kept or filtered."""
        kept: list[int] = []
        filtered: dict[str, list[int]] = {}
        for group in groups:
            if self._filter is None:
                self.judging.add(group.ordinal)
                continue
            try:
                reason = verdict(self._filter, [rollout.reward for rollout in group.rollouts])
            except Exception as error:  # noqa: BLE001 - user code; the group stays and the verdict is tried again
                self._verdict_failed(group.ordinal, error)
                continue
            (filtered.setdefault(reason, []) if reason else kept).append(group.ordinal)
        self._settle_verdicts(kept, filtered)

    def _settle_verdicts(self, kept: list[int], filtered: dict[str, list[int]]) -> None:
        if kept:
            self._books.record(schema.GroupCompleted(tuple(kept)))
        for reason, ordinals in filtered.items():
            self.discard(ordinals, reason)
        for ordinal in kept:
            self._scheduler.settled(ordinal)

    # ------------------------------------------------------------------ group-level work

    def begin_judging(self) -> list[tuple[int, tuple[float, ...]]]:
        """Groups whose work the wrapper runs now, with the rewards of their siblings; end each with `judge` or
        `judging_failed`."""
        groups = self._books.ledger.groups
        begun = self.judging.start(self._books.clock.monotonic())
        return [(ordinal, tuple([rollout.reward for rollout in groups[ordinal].rollouts])) for ordinal in begun]

    def judge(self, ordinal: int, reason: str) -> None:
        """The verdict: "" keeps the group. One that comes when the group was settled otherwise changes nothing."""
        if self.judging.ended(ordinal):
            self._settle_verdicts([] if reason else [ordinal], {reason: [ordinal]} if reason else {})

    def judging_failed(self, ordinal: int, error: Exception) -> None:
        """The work raised: the group stays, the work is tried again."""
        if self.judging.is_at_work(ordinal):
            self._verdict_failed(ordinal, error)

    def _verdict_failed(self, ordinal: int, error: Exception) -> None:
        self.judging.failed(ordinal, f"{type(error).__name__}: {error}"[:300], self._books.clock.monotonic())

    def judge_due(self) -> None:
        """Try again what raised, where the work is done at once."""
        if self._filter is None or not len(self.judging):
            return
        for ordinal, rewards in self.begin_judging():
            try:
                reason = verdict(self._filter, rewards)
            except Exception as error:  # noqa: BLE001 - user code
                self.judging_failed(ordinal, error)
            else:
                self.judge(ordinal, reason)

    def retry_judging(self) -> None:
        """Do not wait for the backoff of work that raised."""
        self.judging.retry_now(self._books.clock.monotonic())
        self.judge_due()

    def discard(self, ordinals: list[int], reason: str) -> None:
        """Settle groups without training them."""
        for ordinal in ordinals:
            self.judging.drop(ordinal)
            self._close_attempts(self._books.ledger.groups[ordinal])
        self._books.record(schema.GroupDiscarded(tuple(ordinals), reason))
        for ordinal in ordinals:
            self._scheduler.settled(ordinal)

    def _close_attempts(self, group: Group) -> None:
        for sibling, rollout in enumerate(group.rollouts):
            if rollout.state is LIVE:
                self._end(Identity(group.ordinal, sibling, rollout.attempt, rollout.incarnation))

    def _end(self, identity: Identity) -> None:
        self._scheduler.ended(identity)
        self._admission.ended([identity])

    def abandon(self, identity: Identity, outcome: Outcome, detail: str) -> None:
        """An attempt ended without a result: try again after a while, or quarantine the group (budget spent)."""
        if self._current(identity) is None:
            self.ignored[outcome.value] += 1
            return
        self._books.record(
            schema.AttemptAbandoned(identity.group, identity.sibling, identity.attempt, outcome.value, detail[:300])
        )
        self._end(identity)
        group = self._books.ledger.groups[identity.group]
        if outcome is Outcome.NOT_CONTINUABLE and group.rollouts[identity.sibling].boundary is not None:
            self._books.record(
                schema.ContinuationDiscarded((identity.group,), (identity.sibling,), detail[:300] or outcome.value)
            )
        self._retry(group, identity.sibling, outcome)

    def discard_continuations(self, rollouts: Sequence[tuple[int, int]], reason: str) -> int:
        """Give up the durable turns of unfinished rollouts (group, sibling), live or waiting: they start over. Those
        without any are left alone, so that it may be repeated; returns how many had some. All or none: raises
        `ContinuationInvalid` for one that is not unfinished."""
        groups, wanted = self._books.ledger.groups, list(dict.fromkeys(rollouts))
        strangers = [f"{g}/{s}" for g, s in wanted if g not in groups or not 0 <= s < len(groups[g].rollouts)
                     or groups[g].rollouts[s].state is SEALED]  # fmt: skip
        if strangers or not wanted:
            raise ContinuationInvalid(
                f"rollouts {', '.join(strangers[:10]) or 'none'}",
                expected="unfinished rollouts",
                action="look at `tidegate inspect RUN --group N`",
                code="not_unfinished",
            )
        found = [(g, s) for g, s in wanted if groups[g].rollouts[s].boundary is not None]
        for ordinal, sibling in found:
            if ordinal not in groups:
                continue  # its budget was spent with the sibling before
            rollout = groups[ordinal].rollouts[sibling]
            if rollout.state is LIVE:
                identity = Identity(ordinal, sibling, rollout.attempt, rollout.incarnation)
                self.abandon(identity, Outcome.NOT_CONTINUABLE, reason)
        waiting = [(g, s) for g, s in found if g in groups and groups[g].rollouts[s].boundary is not None]
        if waiting:
            ordinals, siblings = zip(*waiting, strict=True)
            self._books.record(schema.ContinuationDiscarded(ordinals, siblings, reason[:300]))
        return len(found)

    def _retry(self, group: Group, sibling: int, outcome: Outcome) -> None:
        rollout = group.rollouts[sibling]
        if group.recipe.recovery == "prompt_group":
            self._redo_whole(group)
        self._scheduler.waits(group.ordinal)
        if outcome not in (Outcome.ENGINE_LOST, Outcome.WORKER_LOST, Outcome.NOT_CONTINUABLE):
            self._scheduler.backoff.put(group.ordinal, rollout.failures, self._books.clock.monotonic())
        self._quarantine_if_spent(group)

    def _redo_whole(self, group: Group) -> None:
        """The siblings' attempts end with it, and what they have sealed is dropped."""
        for sibling, rollout in enumerate(group.rollouts):
            if rollout.state is LIVE:
                identity = Identity(group.ordinal, sibling, rollout.attempt, rollout.incarnation)
                self._books.record(
                    schema.AttemptAbandoned(group.ordinal, sibling, rollout.attempt, SIBLING_ENDED, "prompt_group")
                )
                self._end(identity)
        self._books.record(schema.GroupRequeued(group.ordinal, "prompt_group"))

    def _quarantine_if_spent(self, group: Group) -> None:
        """A group with a spent budget is settled once none of its siblings is live."""
        rollout = spent(group, self._limits)
        if rollout is not None and group.state is RESERVED:
            reason = f"{rollout.failures} failed attempts, {rollout.losses} lost processes"
            self._books.record(schema.GroupQuarantined(group.ordinal, reason))
            self._scheduler.settled(group.ordinal)

    def quarantine_spent(self) -> None:
        """After a restart: groups whose last live sibling ended with the incarnation before, or with its limits."""
        for group in list(self._books.ledger.groups.values()):
            self._quarantine_if_spent(group)

    # ------------------------------------------------------------------ durability

    def durable(self, seq: int) -> None:
        """Records up to `seq` are durable: the executions they sealed have ended."""
        while self.unpublished and self.unpublished[0][0] <= seq:
            self._admission.ended(self.unpublished.popleft()[1])


def _receipts_misfit(ended: Ended) -> Misfit | None:
    one = ended.identity
    return receipts_misfit(ended.receipts, one.group, one.sibling, one.attempt)


def _receipts(sealed: Sequence[Ended]) -> tuple[schema.Receipt, ...]:
    return tuple([replace(one, place=place) for place, ended in enumerate(sealed) for one in ended.receipts])


def _repeats(ended: Sequence[Ended]) -> bool:
    """Whether a report names an attempt or a row of its block twice."""
    return len({one.row for one in ended}) < len(ended) or len({one.identity for one in ended}) < len(ended)


def _problem(ended: Ended, rollout: Rollout, newest: int) -> str:
    """Which rule a success breaks: that makes it a malformed result, and no crash of the worker."""
    if not isfinite(ended.reward):
        return f"reward {ended.reward} is not finite"
    if ended.tokens < 1 or ended.row < 0:
        return "no generated token"
    if not first_version(rollout) <= ended.oldest <= newest:
        return version_problem(ended.oldest, rollout, newest)
    if (misfit := _receipts_misfit(ended)) is not None:
        return f"{misfit.found}; expected: {misfit.expected}"
    return f"{ended.samples} samples, which do not follow from the turns before"


def _fits(ended: Ended, last: Boundary) -> bool:
    """Whether the last turn follows from the boundary before it."""
    if last.pending:
        return ended.samples - 1 == last.sample and not (last.requests and last.requests[-1].reply is None)
    return ended.samples - 1 in next_samples(last.sample)
