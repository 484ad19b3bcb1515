"""Acknowledgements of completed results: owed with the seal, delivered at least once, given up for a reason only."""

from __future__ import annotations

import re

import msgspec
import pytest

from gpu.rollout.acknowledging import GIVEN_UP_S
from gpu.rollout.messages import AckBatch, Acked, Dispatch, Report
from storage import schema
from storage.errors import AckMismatch
from storage.snapshot import ledger_rows, rebuild
from tests.rollout.building import Bench


def receipt(boot: str = "b1", host: str = "desk", **changes: object) -> schema.Receipt:
    made = schema.Receipt(0, host, boot, "run/g0/0~0", 1, "r", "a" * 64)
    return msgspec.structs.replace(made, **changes)


def sealing(bench: Bench, dispatches: list[Dispatch], *receipts: schema.Receipt) -> Report:
    report = bench.report_of(dispatches)
    ended = tuple(msgspec.structs.replace(one, receipts=receipts) for one in report.ended)
    return msgspec.structs.replace(report, ended=ended)


def sealed(bench: Bench, *receipts: schema.Receipt, count: int = 2) -> list[Dispatch]:
    taken = bench.control.take("w", count)
    bench.control.report(sealing(bench, taken, *(receipts or (receipt(),))))
    return taken


def take(bench: Bench) -> tuple[AckBatch, ...]:
    return bench.control.results.acknowledging.take()


def answer(bench: Bench, batch: AckBatch, **said: object) -> None:
    bench.control.results.acknowledging.answer(Acked(batch, **said))  # type: ignore[arg-type]


def test_an_acknowledgement_is_owed_with_the_seal_and_goes_out_when_that_is_durable() -> None:
    bench = Bench()
    sealed(bench)
    assert len(bench.control.ledger.obligations) == 2
    assert take(bench) == (), "the host would release what nobody has yet"
    bench.flush()
    (batch,) = take(bench)
    assert (batch.host, batch.boot, len(batch.owed)) == ("desk", "b1", 2)
    assert [one.receipt.place for one in batch.owed] == [0, 1]
    assert take(bench) == (), "one batch is under way"
    answer(bench, batch, done=True)
    assert not bench.control.ledger.obligations
    assert bench.control.ledger.counts["ack_done"] == 1
    answer(bench, batch, done=True)
    assert bench.control.ledger.counts["ack_done"] == 1, "an answer that comes twice changes nothing"


def test_a_host_that_does_not_answer_is_asked_again_later_and_never_given_up() -> None:
    bench = Bench()
    sealed(bench)
    bench.flush()
    pauses = []
    for _ in range(8):
        (batch,) = take(bench)
        answer(bench, batch, done=False, detail="no answer")
        began = bench.clock.monotonic()
        while not (found := take(bench)):
            bench.clock.advance(0.5)
        pauses.append(bench.clock.monotonic() - began)
        answer(bench, found[0], done=False, detail="no answer")
        bench.clock.advance(100.0)
    assert pauses[0] == pytest.approx(1.0)
    assert max(pauses) == pytest.approx(60.0)
    (status,) = bench.control.results.acknowledging.status()
    assert (status["owed"], status["problem"], status["failures"]) == (2, "no answer", 16)
    assert len(bench.control.ledger.obligations) == 2


def test_a_worker_that_never_answers_is_replaced_by_another() -> None:
    bench = Bench()
    sealed(bench)
    bench.flush()
    assert take(bench)
    bench.clock.advance(GIVEN_UP_S - 1)
    assert take(bench) == ()
    bench.clock.advance(2.0)
    assert len(take(bench)) == 1


def test_what_is_owed_to_a_process_that_another_has_replaced_expires_and_no_more_than_that() -> None:
    bench = Bench()
    sealed(bench, receipt("b1"), count=1)
    sealed(bench, receipt("b2"), count=1)
    bench.flush()
    first, second = take(bench)
    answer(bench, first, done=False, replaced=True)
    assert [one.receipt.boot for one in bench.control.ledger.obligations.values()] == ["b2"]
    answer(bench, second, done=True)
    assert not bench.control.ledger.obligations
    assert bench.control.ledger.counts["obligations_expired"] == 1


def test_a_person_may_say_that_a_host_is_gone() -> None:
    bench = Bench()
    sealed(bench)
    bench.control.results.acknowledging.expire("desk", "b1", "the machine was sold")
    assert not bench.control.ledger.obligations
    with pytest.raises(AckMismatch, match="nothing is owed to desk"):
        bench.control.results.acknowledging.expire("desk", "b1", "again")


def test_the_next_incarnation_delivers_what_the_one_before_owed() -> None:
    bench = Bench()
    sealed(bench)
    bench.flush()
    bench.restart()
    (batch,) = take(bench)
    assert len(batch.owed) == 2
    answer(bench, batch, done=True)
    assert not bench.control.ledger.obligations


def test_what_is_owed_is_part_of_a_snapshot() -> None:
    bench = Bench()
    sealed(bench, receipt(), receipt(host="other", capture="g0/0~0", call="g0/0~0.3"), count=1)
    bench.flush()
    rows = ledger_rows(bench.control.ledger)
    assert rebuild(rows).obligations == bench.control.ledger.obligations
    assert len(bench.control.ledger.obligations) == 2


@pytest.mark.parametrize(
    ("receipts", "says"),
    [
        ((receipt(), receipt()), "two receipts of desk"),
        ((receipt(digest="x"),), "sha256"),
        ((receipt(generation=0),), "a generation from 1"),
        ((receipt(boot=""),), "host, boot"),
        ((receipt(capture="g0/0~0"),), "half a lineage"),
        ((receipt(call="c"),), "half a lineage"),
        ((receipt(capture="g0/0~1", call="c"),), "up to attempt 0"),
        ((receipt(capture="g1/0~0", call="c"),), "one of rollout g0/0"),
    ],
)
def test_a_receipt_that_does_not_fit_its_rollout_is_refused_with_the_seal(
    receipts: tuple[schema.Receipt, ...], says: str
) -> None:
    """The attempt is malformed, what came with it in one report counts, and the record itself would be refused."""
    bench = Bench()
    bad, good = bench.control.take("w", 2)
    report = bench.report_of([bad, good])
    ended = (msgspec.structs.replace(report.ended[0], receipts=receipts), report.ended[1])
    bench.control.report(msgspec.structs.replace(report, ended=ended))
    (abandoned,) = bench.abandoned()
    assert (abandoned.sibling, abandoned.reason) == (0, "malformed")
    assert re.search(says, abandoned.detail)
    assert not bench.control.ledger.obligations
    assert bench.control.ledger.counts["rollouts_sealed"] == 1
    other = Bench()
    taken = other.control.take("w", 1)
    other.control.report(other.turn_of(taken[0], 0, 0))
    block = next(iter(other.control.ledger.blocks))
    record = schema.Sealed(block, (0,), (0,), (0,), (1,), (1,), (1,), (0,), (1.0,), receipts)
    with pytest.raises(AckMismatch, match=says):
        other.control.books.record(record)


@pytest.mark.parametrize(
    ("groups", "siblings", "attempts", "boot", "says"),
    [
        ((0,), (0,), (1,), "b1", "none is"),
        ((0,), (0,), (0,), "b2", "one that is owed: b1"),
        ((0, 0), (0, 0), (0, 0), "b1", "twice"),
        ((0,), (0, 1), (0,), "b1", "different lengths"),
        ((), (), (), "b1", "different lengths"),
    ],
)
def test_an_acknowledgement_of_what_is_not_owed_changes_nothing(
    groups: tuple[int, ...], siblings: tuple[int, ...], attempts: tuple[int, ...], boot: str, says: str
) -> None:
    bench = Bench()
    sealed(bench)
    with pytest.raises(AckMismatch, match=says):
        bench.control.books.record(schema.AckDone("desk", boot, groups, siblings, attempts))
    assert len(bench.control.ledger.obligations) == 2


def test_a_run_does_not_end_while_a_host_waits_for_an_acknowledgement() -> None:
    bench = Bench()
    sealed(bench)
    with pytest.raises(AckMismatch, match="2 results that hosts keep are not acknowledged") as refused:
        bench.control.finish("enough")
    assert (refused.value.code, bench.control.ledger.finished) == ("owed", "")
    bench.flush()
    (batch,) = take(bench)
    answer(bench, batch, done=True)
    bench.control.finish("enough")
    assert bench.control.ledger.finished == "enough"
