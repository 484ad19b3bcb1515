"""Completed results: kept until the exact receipt comes back, released in whole batches, and over after that."""

from __future__ import annotations

import json

import msgspec
import pytest

from gpu.environments.participants import completions
from gpu.environments.participants.completions import Completions
from gpu.environments.participants.errors import CompletionRefused, MessageInvalid
from gpu.environments.participants.wire import Receipt, Result
from gpu.environments.resources import Claim

ONE = Claim(1, 0)


def result(content: str = '{"reward": 1.0, "id": "r7"}', **more: str) -> Result:
    return Result(content=content.encode(), **more)


def completed(kept: Completions, session: str = "run/g0/0~0", claim: Claim = ONE, **more: str) -> Receipt:
    kept.check_use(session, claim)
    kept.begins(session, claim)
    return kept.complete(session, claim, result(**more))


def test_a_result_is_kept_with_a_receipt_that_names_all_of_it() -> None:
    kept = Completions()
    receipt = completed(kept, capture="run/g0/0~0", call="c9")
    assert (receipt.session, receipt.incarnation, receipt.attempt, receipt.result) == ("run/g0/0~0", 1, 0, "r7")
    assert (receipt.capture, receipt.call, len(receipt.digest)) == ("run/g0/0~0", "c9", 64)
    assert [one.receipt for one in kept.retained()] == [receipt]


@pytest.mark.parametrize(
    ("content", "identity"),
    [
        ('{"id": "x"}', "x"),
        ('{"response": {"id": "y"}}', "y"),
        ('{"id": "", "response": {"id": "y"}}', "y"),
        ('{"id": 7}', None),
        ('{"response": [1]}', None),
    ],
)
def test_the_identity_is_the_results_id_or_its_responses_or_the_digest(content: str, identity: str | None) -> None:
    kept = Completions()
    kept.begins("s", ONE)
    receipt = kept.complete("s", ONE, result(content))
    assert receipt.result == (identity or receipt.digest)


def test_the_same_result_again_is_the_same_receipt_however_it_is_written() -> None:
    kept = Completions()
    receipt = completed(kept)
    assert kept.complete("run/g0/0~0", ONE, result('{"id":"r7",   "reward":1.0}')) == receipt
    assert len(kept.retained()) == 1


def test_another_reward_for_the_same_attempt_is_refused_and_the_first_is_kept() -> None:
    kept = Completions()
    receipt = completed(kept)
    with pytest.raises(CompletionRefused, match="another digest"):
        kept.complete("run/g0/0~0", ONE, result('{"reward": 0.5, "id": "r7"}'))
    assert [one.receipt for one in kept.retained()] == [receipt]


@pytest.mark.parametrize("content", ['{"reward": NaN}', '{"reward": Infinity}', "[1]", "1", "", "{", '{"a": "\ud800"}'])
def test_what_is_no_json_object_is_refused_each_time_and_keeps_nothing(content: str) -> None:
    kept = Completions()
    kept.begins("s", ONE)
    for _ in range(2):
        with pytest.raises(MessageInvalid):
            kept.complete("s", ONE, Result(content=content.encode("utf-8", "surrogatepass")))
    assert not kept.retained()


def test_half_of_a_model_call_is_refused() -> None:
    kept = Completions()
    kept.begins("s", ONE)
    for half in ({"capture": "k"}, {"call": "c"}):
        with pytest.raises(MessageInvalid):
            kept.complete("s", ONE, result(**half))


def test_a_result_of_an_attempt_that_is_not_under_way_is_refused() -> None:
    kept = Completions()
    with pytest.raises(CompletionRefused):
        kept.complete("s", ONE, result())
    kept.begins("s", Claim(1, 1))
    with pytest.raises(CompletionRefused):
        kept.complete("s", ONE, result())


def test_an_acknowledgement_whose_reply_was_lost_is_sent_again_and_answers_duplicate() -> None:
    kept = Completions()
    receipt = completed(kept)
    assert kept.acknowledge([receipt]) == ("new",)
    assert kept.acknowledge([receipt]) == ("duplicate",)
    assert not kept.retained()


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": "0" * 64},
        {"generation": 2},
        {"attempt": 1},
        {"incarnation": 2},
        {"result": "r8"},
        {"capture": "k", "call": "c"},
        {"session": "run/g9/0~0"},
    ],
)
@pytest.mark.parametrize("acknowledged", [False, True])
def test_an_acknowledgement_with_a_wrong_field_releases_nothing_of_its_batch(wrong: dict, acknowledged: bool) -> None:
    kept = Completions()
    receipt, other = completed(kept), completed(kept, "run/g1/0~0")
    if acknowledged:
        kept.acknowledge([receipt])
    with pytest.raises(CompletionRefused) as refused:
        kept.acknowledge([other, msgspec.structs.replace(receipt, **wrong)])
    assert "session" in wrong or all(name in refused.value.found for name in wrong), "it names the field"
    assert other in [one.receipt for one in kept.retained()]


def test_of_a_hundred_acknowledgements_with_one_bad_one_none_is_released() -> None:
    kept = Completions()
    receipts = [completed(kept, f"run/g{group}/0~0") for group in range(100)]
    bad = [*receipts[:57], msgspec.structs.replace(receipts[57], digest="0" * 64), *receipts[58:]]
    with pytest.raises(CompletionRefused):
        kept.acknowledge(bad)
    assert len(kept.retained()) == 100
    assert kept.acknowledge(receipts) == ("new",) * 100


def test_a_batch_that_names_a_session_twice_is_refused() -> None:
    kept = Completions()
    receipt = completed(kept)
    with pytest.raises(CompletionRefused):
        kept.acknowledge([receipt, receipt])
    assert len(kept.retained()) == 1


def test_after_the_acknowledgement_a_late_begin_or_result_of_that_attempt_and_older_ones_is_refused() -> None:
    kept = Completions()
    kept.acknowledge([completed(kept, claim=Claim(2, 3))])
    for late in (Claim(2, 3), Claim(2, 2), Claim(1, 9)):
        with pytest.raises(CompletionRefused):
            kept.check_use("run/g0/0~0", late)
        with pytest.raises(CompletionRefused):
            kept.complete("run/g0/0~0", late, result())
    kept.check_use("run/g0/0~0", Claim(2, 4))


def test_an_attempt_that_has_a_result_does_not_begin_again_and_a_newer_one_drops_that_result() -> None:
    kept = Completions()
    receipt = completed(kept)
    with pytest.raises(CompletionRefused):
        kept.check_use("run/g0/0~0", ONE)
    newer = completed(kept, claim=Claim(2, 1))
    assert [one.receipt for one in kept.retained()] == [newer]
    with pytest.raises(CompletionRefused):
        kept.acknowledge([receipt])
    assert newer.generation != receipt.generation


def test_results_beyond_the_bound_are_refused_and_none_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "RETAINED", 2)
    kept = Completions()
    receipts = [completed(kept, f"s{i}") for i in range(2)]
    with pytest.raises(CompletionRefused):
        completed(kept, "s2")
    kept.acknowledge(receipts[:1])
    assert kept.complete("s2", ONE, result()).session == "s2"


def test_a_result_whose_session_the_run_ends_is_released_and_its_acknowledgement_may_still_come() -> None:
    kept = Completions()
    receipt = completed(kept)
    kept.ended("run/g0/0~0")
    assert not kept.retained()
    assert kept.acknowledge([receipt]) == ("duplicate",)
    with pytest.raises(CompletionRefused):
        kept.check_use("run/g0/0~0", ONE)


def test_the_memory_of_what_was_acknowledged_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "ACKNOWLEDGED", 2)
    kept = Completions()
    receipts = [completed(kept, f"s{i}") for i in range(3)]
    for receipt in receipts:
        kept.acknowledge([receipt])
    assert kept.acknowledge(receipts[1:]) == ("duplicate",) * 2
    with pytest.raises(CompletionRefused):
        kept.acknowledge(receipts[:1])


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    kept = Completions()
    for index in range(1000):
        kept.acknowledge([completed(kept, f"s{index}")])
    kept.forget([f"s{index}" for index in range(1000)])
    assert json.dumps([len(known) for known in (kept._begun, kept._retained, kept._acknowledged)]) == "[0, 0, 0]"
