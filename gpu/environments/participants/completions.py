"""Results of attempts that ended on a host, kept until the run says that it has them.

A result leaves only against its exact receipt. The same result twice is the same receipt, another one for the same
attempt is refused; a batch of acknowledgements is taken whole or not at all, and answered `new` or `duplicate` for
each. Afterwards that attempt and older ones can neither begin nor end any more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec

from gpu.environments.participants.errors import CompletionRefused, MessageInvalid
from gpu.environments.participants.wire import Receipt, Result, Retained
from gpu.environments.resources import Claim, canonical

RETAINED = 4096
"""Results that wait for their acknowledgement; with more, no further attempt can end."""
ACKNOWLEDGED = 100_000
"""Acknowledged receipts that a host remembers, the newest ones."""


class _Kept(NamedTuple):
    receipt: Receipt
    content: bytes


class Completions:
    """Raises `CompletionRefused`."""

    def __init__(self) -> None:
        self._count = 0
        self._begun: dict[str, tuple[Claim, int]] = {}
        self._retained: dict[str, _Kept] = {}
        self._acknowledged: dict[str, Receipt] = {}

    def check_use(self, session: str, claim: Claim) -> None:
        """An attempt wants to use a session; one that is over may not. A newer one than that of a retained result is
        welcome: the run has not got that result, and never will."""
        done = self._acknowledged.get(session)
        if done is not None and claim <= _claim(done):
            raise _refused(f"attempt {claim.attempt} of {session} comes after its acknowledgement", "over")
        kept = self._retained.get(session)
        if kept is not None and claim <= _claim(kept.receipt):
            raise _refused(f"attempt {claim.attempt} of {session} comes after its result", "completed")

    def begins(self, session: str, claim: Claim) -> None:
        """It has the session now. Each begin in this process has a number of its own, its generation."""
        if session not in self._begun or self._begun[session][0] != claim:
            self._count += 1
            self._begun[session] = (claim, self._count)
        kept = self._retained.get(session)
        if kept is not None and claim > _claim(kept.receipt):
            del self._retained[session]

    def complete(self, session: str, claim: Claim, result: Result) -> Receipt:
        """Keep a result. Raises `MessageInvalid` for one that is no JSON object, or has half of a model call."""
        content = _canonical(result)
        done = self._acknowledged.get(session)
        if done is not None and claim <= _claim(done):
            raise _refused(f"a result of attempt {claim.attempt} of {session} after its acknowledgement", "over")
        kept = self._retained.get(session)
        if kept is not None and claim <= _claim(kept.receipt):
            again = _receipt(session, claim, kept.receipt.generation, result, content)
            if again == kept.receipt:
                return again
            raise _refused(f"{_difference(again, kept.receipt)} for {session}, which has a result", "other_result")
        known, generation = self._begun.get(session, (None, 0))
        if known != claim:
            raise _refused(f"a result of attempt {claim.attempt} of {session}, which is not under way", "not_begun")
        if len(self._retained) >= RETAINED:
            raise _refused(f"{RETAINED} results wait for their acknowledgement", "full")
        receipt = _receipt(session, claim, generation, result, content)
        self._retained[session] = _Kept(receipt, content)
        del self._begun[session]
        return receipt

    def ended(self, session: str) -> None:
        """The run ends a session: a result that it has not acknowledged is one that it has, or will never have."""
        self._begun.pop(session, None)
        if session in self._retained:
            self._release(session)

    def retained(self) -> tuple[Retained, ...]:
        return tuple(Retained(receipt=one.receipt, content=one.content) for one in self._retained.values())

    def acknowledge(self, receipts: Sequence[Receipt]) -> tuple[str, ...]:
        """All of them, or none when one of them does not fit."""
        outcomes = tuple(self._outcome(receipt) for receipt in receipts)
        if len({receipt.session for receipt in receipts}) < len(receipts):
            raise _refused("a batch that names a session twice", "repeated")
        for receipt, outcome in zip(receipts, outcomes, strict=True):
            if outcome == "new":
                self._release(receipt.session)
        return outcomes

    def forget(self, sessions: Sequence[str]) -> None:
        """Of sessions of which nothing is owed and nothing can come any more: their results and marks."""
        for session in sessions:
            for known in (self._begun, self._retained, self._acknowledged):
                known.pop(session, None)

    def _release(self, session: str) -> None:
        self._acknowledged.pop(session, None)
        self._acknowledged[session] = self._retained.pop(session).receipt
        while len(self._acknowledged) > ACKNOWLEDGED:
            del self._acknowledged[next(iter(self._acknowledged))]

    def _outcome(self, receipt: Receipt) -> str:
        kept = self._retained.get(receipt.session)
        if kept is not None and kept.receipt == receipt:
            return "new"
        done = self._acknowledged.get(receipt.session)
        if done == receipt:
            return "duplicate"
        known = kept.receipt if kept is not None else done
        found = _difference(receipt, known) if known is not None else "a receipt that was not issued"
        raise _refused(f"an acknowledgement of {receipt.session} with {found}", "mismatch")


def _receipt(session: str, claim: Claim, generation: int, result: Result, content: bytes) -> Receipt:
    digest = hashlib.sha256(content).hexdigest()
    return Receipt(
        session=session,
        incarnation=claim.incarnation,
        attempt=claim.attempt,
        generation=generation,
        result=_identity(content, digest),
        digest=digest,
        capture=result.capture,
        call=result.call,
    )


def _claim(receipt: Receipt) -> Claim:
    return Claim(receipt.incarnation, receipt.attempt)


def _canonical(result: Result) -> bytes:
    found = "half of a model call"
    if (result.capture is None) == (result.call is None):
        try:
            return canonical(msgspec.json.decode(result.content, type=dict[str, Any]))
        except ValueError as error:
            found = str(error)
    raise MessageInvalid(
        f"Result: {found}",
        expected="a JSON object; capture and call both or neither",
        action="correct the code that reports results",
    )


def _identity(content: bytes, digest: str) -> str:
    """The result's own id, that of its response, or its digest."""
    result: dict[str, Any] = json.loads(content)
    response: Any = result.get("response")
    nested: Any = cast("dict[str, Any]", response).get("id") if isinstance(response, dict) else None
    for one in (result.get("id"), nested):
        if isinstance(one, str) and 1 <= len(one) <= 512:
            return one
    return digest


def _difference(found: Receipt, known: Receipt) -> str:
    """The fields in which two receipts differ."""
    names = [field.name for field in msgspec.structs.fields(Receipt)]
    return "another " + " and ".join(name for name in names if getattr(found, name) != getattr(known, name))


def _refused(found: str, code: str) -> CompletionRefused:
    return CompletionRefused(
        found,
        expected="one result per attempt, and the receipt that was issued for it",
        action="nothing: the host keeps what it has",
        code=code,
    )
