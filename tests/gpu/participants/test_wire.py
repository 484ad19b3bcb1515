"""Messages: what is unknown refuses and says what is supported, names cannot leave their place, errors come back."""

from __future__ import annotations

import json

import pytest

from gpu.environments.participants import wire
from gpu.environments.participants.errors import BY_NAME, HostFailed, MessageInvalid
from storage.errors import ResourceInvalid, SchemaUnsupported

CLAIM = {"schema_version": 1, "session": "run/g4/0~1", "claim": {"incarnation": 1, "attempt": 0}}


def claim(**changes: object) -> bytes:
    return json.dumps({**CLAIM, **changes}).encode()


def test_a_message_is_what_was_sent() -> None:
    sent = wire.Claim(session="run/g4/0~1", claim=wire.Held(incarnation=1, attempt=0))
    assert wire.decode(wire.encode(sent), wire.Claim) == sent
    assert wire.decode(claim(), wire.Claim) == sent


@pytest.mark.parametrize("version", [2, 0, True, 1.0, "1", None, [1]])
def test_another_version_refuses_and_names_the_supported_one(version: object) -> None:
    with pytest.raises(SchemaUnsupported, match="schema_version 1, the only supported one"):
        wire.decode(claim(schema_version=version), wire.Claim)


def test_a_missing_version_refuses() -> None:
    with pytest.raises(SchemaUnsupported, match="missing"):
        wire.decode(b"{}", wire.Claim)


@pytest.mark.parametrize(
    "data",
    [
        claim(more=1),
        claim(claim={"incarnation": 1, "attempt": 0, "more": 1}),
        claim(claim={"incarnation": 1}),
        claim(claim={"incarnation": True, "attempt": 0}),
        claim(claim={"incarnation": -1, "attempt": 0}),
        b"[]",
        b"",
        b"\xff",
        claim()[:-1],
    ],
)
def test_unknown_missing_and_malformed_fields_refuse_and_name_the_known_ones(data: bytes) -> None:
    with pytest.raises(MessageInvalid, match="schema_version, session, claim"):
        wire.decode(data, wire.Claim)


@pytest.mark.parametrize(
    "name", ["..", "a/../b", "/a", "a//b", "a/", ".a", "a/.b", "", "a\n", "a b", "a\\b", "ä", "a" * 513, "a\0"]
)
def test_names_that_are_no_plain_path_refuse(name: str) -> None:
    with pytest.raises(MessageInvalid):
        wire.decode(claim(session=name), wire.Claim)


@pytest.mark.parametrize("checkpoint", ["..", "a/b", "", "a" * 129, "-a"])
def test_checkpoint_ids_are_one_part_of_a_name(checkpoint: str) -> None:
    data = json.dumps({"schema_version": 1, "checkpoint": checkpoint}).encode()
    with pytest.raises(MessageInvalid):
        wire.decode(data, wire.Release)


def test_every_refusal_comes_back_as_its_class_with_its_text() -> None:
    here = wire.Instance(name="notes", boot="b1")
    for kind in BY_NAME.values():
        error = kind("this", expected="that", action="do", code="why")
        back = wire.raised(wire.decode(wire.encode(wire.failure(here, error)), wire.Failure))
        assert (type(back), str(back)) == (type(error), str(error))
    unknown = wire.Failure(instance=here, error="Newer", found="f", expected="e", action="a", code="c")
    assert isinstance(wire.raised(unknown), HostFailed)
    assert ResourceInvalid.__name__ in BY_NAME
