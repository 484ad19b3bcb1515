"""What cannot be saved as configured is refused at set-up, and a restore wants the same participants."""

from __future__ import annotations

import msgspec
import pytest

from gpu.environments.base import CheckpointMode
from gpu.environments.participants import wire
from gpu.environments.participants.capabilities import (
    CONTROL,
    DEPENDENCIES,
    DISCARD,
    RECEIPTS,
    Capabilities,
    Component,
    check_same,
    check_topology,
)
from gpu.environments.participants.errors import MessageInvalid
from storage.errors import ConfigurationRefused, FingerprintMismatch, SchemaUnsupported

ALL = (CONTROL, RECEIPTS, DEPENDENCIES, DISCARD)


def record(name: str, component: Component = Component.RESOURCE, boot: str = "b1", **more: object) -> Capabilities:
    stated: dict = {"checkpoint_mode": CheckpointMode.EXPORT_RESTORE, "features": ALL, **more}
    return Capabilities(instance=wire.Instance(name=name, boot=boot), component=component, name=name, **stated)


MODEL, AGENT, TOOL = record("policy", Component.MODEL), record("coder", Component.AGENT), record("shell")


def test_a_topology_that_can_be_saved_has_a_fingerprint_of_its_contracts() -> None:
    print_ = check_topology([MODEL, AGENT, TOOL])
    assert check_topology([TOOL, MODEL, AGENT]) == print_, "in any order"
    restarted = [
        msgspec.structs.replace(one, instance=wire.Instance(name=one.name, boot="b2")) for one in (MODEL, TOOL)
    ]
    assert check_topology([*restarted, record("coder", Component.AGENT, features=(*ALL, "new"))]) == print_


@pytest.mark.parametrize(
    ("records", "error", "code"),
    [
        ([TOOL, record("shell")], ConfigurationRefused, "duplicate"),
        ([TOOL, record("shell", Component.AGENT)], ConfigurationRefused, "duplicate"),
        ([record("a", schema_version=2)], SchemaUnsupported, ""),
        (
            [record("a", Component.AGENT, checkpoint_mode=CheckpointMode.RESTART_ONLY)],
            ConfigurationRefused,
            "agent_mode",
        ),
        ([record("a", Component.AGENT, checkpoint_mode=CheckpointMode.STATELESS)], ConfigurationRefused, "agent_mode"),
        ([record("a", Component.AGENT, features=(CONTROL,))], ConfigurationRefused, "feature"),
        ([record("a", features=())], ConfigurationRefused, "feature"),
        (
            [
                record("a", Component.AGENT, features=(CONTROL, RECEIPTS, DISCARD)),
                record("r", checkpoint_mode=CheckpointMode.RESTART_ONLY),
            ],
            ConfigurationRefused,
            "feature",
        ),
    ],
)
def test_what_cannot_be_saved_as_configured_is_refused(records: list, error: type, code: str) -> None:
    with pytest.raises(error) as refused:
        check_topology(records)
    assert not code or refused.value.code == code


def test_resources_that_save_nothing_need_no_features() -> None:
    for mode in (CheckpointMode.RESTART_ONLY, CheckpointMode.STATELESS):
        check_topology([AGENT, record("r", checkpoint_mode=mode, features=())])


@pytest.mark.parametrize(
    "other",
    [
        [MODEL, AGENT],
        [MODEL, AGENT, record("bash")],
        [MODEL, AGENT, record("shell", checkpoint_mode=CheckpointMode.STATELESS)],
        [MODEL, AGENT, record("shell", replayable=True)],
        [MODEL, record("coder", Component.MODEL), TOOL],
        [MODEL, AGENT, TOOL, record("more")],
    ],
)
def test_a_restore_onto_other_participants_is_refused(other: list[Capabilities]) -> None:
    saved = check_topology([MODEL, AGENT, TOOL])
    check_same(saved, [TOOL, AGENT, MODEL])
    with pytest.raises(FingerprintMismatch):
        check_same(saved, other)


def test_unknown_modes_components_and_fields_refuse() -> None:
    said = msgspec.to_builtins(TOOL)
    for change in ({"checkpoint_mode": "sometimes"}, {"component": "judge"}, {"more": 1}):
        with pytest.raises(MessageInvalid):
            wire.decode(msgspec.json.encode({**said, **change}), Capabilities)
