"""Every class and code of error has an example that violates it; each is noticed before anything changes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from flows.config import RunConfig
from gpu.prepare import preflight
from storage import errors
from storage.errors import FingerprintMismatch, RestoreNotFresh, TidegateError
from storage.local import LocalStore
from storage.runs import RunPaths, check_fingerprints, make_run
from tests.flows.test_changed_settings import go_on
from tests.storage import acted
from tests.storage.raised import CLASSES, ROOT, raised
from tests.storage.violations import VIOLATIONS, Violation, sound, verifies

ALL = [*VIOLATIONS, *acted.VIOLATIONS]
FILES = {"payload_file", "block_name", "parts"}
"""Examples that need blocks in files."""


@pytest.mark.parametrize("one", ALL, ids=[one.name for one in ALL])
def test_a_violation_is_named_and_nothing_changes(one: Violation) -> None:
    store = sound(files=one.what in FILES, acting=one in acted.VIOLATIONS)
    one.edit(store)
    before = dict(store._objects)
    if one.notice is verifies:
        said = verifies(store)
        assert any(problem.startswith(f"[{one.code}] found: ") for problem in said), said
        assert all("; expected: " in problem and "; do: " in problem for problem in said), said
    else:
        with pytest.raises(TidegateError) as caught:
            one.notice(store)
        error = caught.value
        assert (type(error).__name__, error.code, error.exit_code) == (one.kind, one.code, one.exit_code), error
        assert error.found
        assert error.expected
        assert error.action
    assert store._objects == before


def test_the_sound_runs_have_nothing_of_it() -> None:
    for files in (False, True):
        assert verifies(sound(files=files)) == []
    assert verifies(sound(acting=True)) == []


# ---------------------------------------------------------------------- preflight


def on_disk(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model", {"seed": 5}),
        ("source", {"environment": {"epochs": 7}}),
        ("source", {"environment": {"shuffle": False}}),
        ("environment", {"environment": {"options": {"letters": 3}}}),
        ("num_siblings", {"rollout": {"siblings": 3}}),
        ("staleness", {"rollout": {"staleness": 3}}),
    ],
)
def test_going_on_with_another_meaning_is_refused_before_anything_starts(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    go_on(tmp_path)
    before = on_disk(tmp_path)
    spec = RunConfig.model_validate({"run": "r", "storage": {"url": str(tmp_path)}, **changes}).spec("r")
    with pytest.raises(FingerprintMismatch) as caught:
        preflight(spec)
    assert (caught.value.code, caught.value.exit_code) == (f"fingerprint_{name}", 2)
    assert caught.value.found != caught.value.expected
    assert caught.value.action
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize("name", ["feature", "model"])
def test_a_fingerprint_that_one_side_does_not_have_is_refused(name: str) -> None:
    info = make_run(run="r", created=0, num_siblings=2, staleness=None, fingerprints={"model": "m"}, settings={})
    wanted = {"model": "m", "feature": "on"} if name == "feature" else {}
    with pytest.raises(FingerprintMismatch, match="absent") as caught:
        check_fingerprints(info, wanted, 2, None)
    assert (caught.value.code, caught.value.exit_code) == (f"fingerprint_{name}", 2)


def test_a_journal_without_its_description_is_never_taken_over(tmp_path: Path) -> None:
    go_on(tmp_path)
    (tmp_path / RunPaths("r").info).unlink()
    before = on_disk(tmp_path)
    spec = RunConfig.model_validate({"run": "r", "storage": {"url": str(tmp_path)}}).spec("r")
    with pytest.raises(RestoreNotFresh) as caught:
        preflight(spec)
    assert caught.value.exit_code == 2
    with pytest.raises(RestoreNotFresh):
        go_on(tmp_path)
    assert on_disk(tmp_path) == before
    assert LocalStore(tmp_path).size(RunPaths("r").info) is None


# ---------------------------------------------------------------------- nothing is left out

LIVE = "tests/storage/test_validation_live.py::"
PARTICIPANTS = "tests/gpu/participants/"
CAPABILITIES = PARTICIPANTS + "test_capabilities.py::test_what_cannot_be_saved_as_configured_is_refused"
CONTROLLER, OVER_HTTP = PARTICIPANTS + "test_controller.py::", PARTICIPANTS + "test_sessions.py::"
SESSIONS = "tests/gpu/test_session_codes.py::"
ELSEWHERE: dict[tuple[str, str], str] = {
    ("CheckpointRefused", "checkpoint_refused"):
        "tests/storage/test_retention.py::"
        "test_no_checkpoint_is_recorded_that_rests_on_what_a_stopped_manager_may_be_deleting",
    ("ContinuationInvalid", "replay"): SESSIONS + "test_a_step_that_makes_other_calls_than_before_is_refused",
    ("ResourceInvalid", "claimed"): SESSIONS + "test_an_attempt_is_barred_by_a_later_one",
    ("ResourceInvalid", "missing"): SESSIONS + "test_a_session_that_was_never_started_or_has_ended_is_missing",
    ("ResourceInvalid", "receipts"): SESSIONS + "test_a_session_keeps_so_many_receipts_and_no_more",
    ("ResourceInvalid", "uncertain"): SESSIONS + "test_a_session_whose_change_ended_in_the_middle_is_uncertain",
    ("FingerprintMismatch", "fingerprint_dtype"):
        "tests/flows/test_fork.py::test_a_fork_that_cannot_be_is_the_users_mistake",
    ("ForkRefused", "damaged"):
        "tests/storage/test_fork_damage.py::"
        "test_a_damaged_journal_refuses_and_forks_from_the_last_good_position_on_request",
    ("ForkRefused", "fork_unfinished"): "tests/flows/test_fork.py::test_an_unfinished_fork_cannot_be_resumed",
    ("ForkRefused", "left_over"):
        "tests/storage/test_fork.py::test_an_object_that_is_there_is_proven_and_not_written_again",
    ("ActorLost", "actor_lost"): "tests/gpu/test_server.py::test_the_death_of_an_engine_ends_every_request_of_a_client",
    ("ArtifactCorrupt", "weights"):
        "tests/gpu/engines.py::test_a_bad_update_is_refused_whole_and_the_old_version_answers",
    ("CommitUnknown", "commit_unknown"):
        "tests/storage/test_stores.py::test_an_entry_that_could_not_be_synced_is_unknown",
    ("ConfigurationRefused", "capability"):
        "tests/rollout/test_capabilities.py::test_some_capacities_are_refused_with_the_names_of_those_that_lack",
    ("ConfigurationRefused", "configuration"):
        "tests/flows/test_bad_input.py::test_a_configuration_that_cannot_work_is_refused",
    ("ConfigurationRefused", "deadlock"):
        "tests/rollout/test_limits.py::test_a_deadlock_is_refused_with_its_arithmetic",
    ("ConfigurationRefused", "needs_receipts"): "tests/rollout/test_capabilities.py::test_training_needs_receipts",
    ("DeadlineExceeded", "activate"): LIVE + "test_an_activation_that_no_engine_confirms_ends_with_what_they_do",
    ("DeadlineExceeded", "commit"):
        "tests/rollout/test_manager.py::test_a_commit_is_repeated_until_the_store_is_back_and_says_meanwhile_why_it_waits",
    ("DeadlineExceeded", "drain"):
        "tests/rollout/test_manager.py::test_at_the_deadline_of_a_frontier_the_update_proceeds_cancels_or_fails",
    ("DeadlineExceeded", "lease"):
        "tests/rollout/test_manager.py::test_a_lease_that_comes_too_late_says_what_was_missing_and_who_has_it",
    ("EngineFailed", "engine"):
        "tests/gpu/test_server.py::test_a_failure_of_the_engine_reaches_every_call_with_its_cause",
    ("HoldRefused", "expired"):
        "tests/rollout/test_waits.py::test_a_hold_that_expires_aborts_its_activation_before_admission_reopens",
    ("AckMismatch", "acknowledgement"):
        "tests/rollout/test_acknowledging.py::test_an_acknowledgement_of_what_is_not_owed_changes_nothing",
    ("AckMismatch", "capture"):
        "tests/rollout/test_acknowledging.py::test_a_receipt_that_does_not_fit_its_rollout_is_refused_with_the_seal",
    ("AckMismatch", "owed"):
        "tests/rollout/test_acknowledging.py::test_a_run_does_not_end_while_a_host_waits_for_an_acknowledgement",
    ("ConfigurationRefused", "agent_mode"): CAPABILITIES,
    ("ConfigurationRefused", "duplicate"): CAPABILITIES,
    ("ConfigurationRefused", "feature"): CAPABILITIES,
    ("ConfigurationRefused", "host"): "tests/flows/test_hosts.py::test_a_process_that_is_owed_nothing_is_refused",
    ("ConfigurationRefused", "host_name"):
        OVER_HTTP + "test_another_host_at_the_address_is_not_taken_for_the_right_one",
    ("ConfigurationRefused", "manager"):
        "tests/rollout/test_discarding.py::test_a_run_that_nobody_drives_is_refused",
    ("ContinuationInvalid", "not_unfinished"):
        "tests/rollout/test_discarding.py::test_of_rollouts_one_of_which_is_finished_none_is_discarded",
    ("ConfigurationRefused", "mode"): OVER_HTTP + "test_a_host_that_saves_nothing_is_refused",
    ("DeadlineExceeded", "deadline"):
        CONTROLLER + "test_a_hung_request_fails_one_prepare_and_the_next_checkpoint_succeeds",
    ("DeadlineExceeded", "deadline_far"):
        "tests/gpu/participants/test_protocol.py::test_a_deadline_that_is_past_or_too_far_is_refused",
    ("DeadlineExceeded", "deadline_past"):
        "tests/gpu/participants/test_protocol.py::test_a_deadline_that_is_past_or_too_far_is_refused",
    ("FingerprintMismatch", "participant"):
        CONTROLLER + "test_an_altered_checkpoint_is_detected_before_any_host_is_asked",
    ("FingerprintMismatch", "participant_set"):
        CONTROLLER + "test_an_altered_checkpoint_is_detected_before_any_host_is_asked",
    ("FingerprintMismatch", "topology"):
        "tests/gpu/participants/test_capabilities.py::test_a_restore_onto_other_participants_is_refused",
    ("ResourceInvalid", "unanswered"):
        "tests/gpu/test_tool_environments.py::test_without_an_answer_in_time_nobody_knows_and_nothing_is_sent_again",
    ("HoldRefused", "hold"):
        "tests/rollout/test_control.py::test_a_hold_whose_owner_is_silent_expires_and_effects_under_it_are_refused",
    ("HoldRefused", "lease_open"): "tests/rollout/test_control.py::test_a_checkpoint_needs_a_hold_and_no_open_lease",
    ("LeaseRefused", "capture"): LIVE + "test_an_upload_without_a_capture_is_refused",
    ("LeaseRefused", "lease"):
        "tests/rollout/test_control.py::test_finishing_needs_every_lease_settled_and_then_settles_the_rest",
    ("LeaseRefused", "state"): "tests/gpu/test_checkpoints.py::test_a_step_that_the_trainer_has_left_is_not_captured",
    ("LedgerInvalid", "conservation"): LIVE + "test_counts_that_do_not_add_up_are_found",
    ("LedgerInvalid", "version_unknown"):
        "tests/rollout/test_control.py::test_nothing_starts_before_an_engine_serves_the_published_version",
    ("LineageInvalid", "version_order"):
        "tests/gpu/engines.py::test_versions_never_go_back_and_the_same_twice_is_a_no_op",
    ("ObjectExists", "object_exists"):
        "tests/storage/contract.py::test_creation_is_exclusive_and_leaves_the_first_content",
    ("ObjectMissing", "object_missing"): "tests/storage/contract.py::test_a_missing_object_is_a_typed_error",
    ("PreconditionFailed", "precondition"): "tests/storage/contract.py::test_swap_replaces_only_what_was_read",
    ("QuarantineRefused", "quarantine"):
        "tests/rollout/test_waits.py::test_a_release_of_groups_that_are_not_quarantined_releases_none",
    ("ResourceUnavailable", "resource_unavailable"):
        "tests/gpu/test_cluster.py::test_what_the_cluster_does_not_have_is_refused_before_anything_starts",
    ("RestoreRefused", "diverged"): LIVE + "test_a_redone_step_that_differs_stops_a_strict_run",
    ("RestoreRefused", "unsaved"): LIVE + "test_going_on_too_far_past_the_last_checkpoint_is_refused",
    ("RunBusy", "run_busy"): "tests/rollout/test_callers.py::test_another_owner_is_refused_while_the_driver_lives",
    ("RunFenced", "displaced"): "tests/rollout/test_callers.py::test_a_displaced_owner_never_comes_back",
    ("StorageUnusable", "credentials"):
        "tests/storage/test_s3.py::test_wrong_and_absent_keys_say_so_and_are_not_repeated",
    ("StorageUnusable", "storage_unusable"): "tests/storage/test_stores.py::test_a_place_that_is_no_folder_is_unusable",
    ("StorageUnusable", "store_not_exclusive"):
        "tests/storage/test_s3.py::test_a_store_that_ignores_preconditions_is_refused",
    ("StorageUnusable", "upload_altered"): LIVE + "test_a_store_that_keeps_other_bytes_than_it_was_sent_is_unusable",
    ("StorageUnusable", "url"):
        "tests/flows/test_storage_of_users.py::test_keys_in_a_storage_url_are_refused_and_not_repeated",
    ("StoreUnavailable", "store_unavailable"):
        "tests/storage/test_stores.py::test_a_full_disk_leaves_nothing_and_can_be_retried",
    ("TidegateError", "manager"):
        "tests/rollout/test_callers.py::test_a_manager_that_has_ended_lets_nobody_in_and_says_why",
    ("TrainingDiverged", "diverged"):
        "tests/gpu/test_training.py::test_a_gradient_that_is_not_finite_changes_nothing_and_the_lease_can_be_rolled_back",
    ("UploadLost", "upload_lost"): "tests/storage/test_publishing.py::"
        "test_a_process_that_is_killed_in_the_middle_leaves_nothing_half_valid_and_the_next_try_ends_it",
    ("WeightsUnavailable", "weights"): LIVE + "test_weights_that_nobody_holds_any_more_are_unavailable",
}  # fmt: skip
"""Errors of live processes and of stores: the test that leads to each."""
NOT_YET = {
    "ResourceInvalid: unknown resource, orphan session": "a rollout that used what is not there any more starts over,"
    " with a record that says so; sessions that nobody knows are the hosts' own",
    "LedgerInvalid: unsafe state": "states of environments are opaque bytes until their format is declared",
    "LineageInvalid: call missing, ambiguous": "a boundary's call is the row that it names; if that is missing,"
    " ReferenceInvalid says so",
    "ContinuationInvalid: stale": "there is one continuation of a rollout, its last boundary",
}
"""Lines of the contract's table that nothing in a store can violate, and why."""


def test_what_is_not_yet_raised_has_no_class_or_code_either() -> None:
    codes = {code for _, code in raised()}
    assert not {"unsafe_state", "call_missing", "stale", "unknown_resource", "orphan_session"} & codes
    assert all(NOT_YET.values())


def test_every_code_has_its_example() -> None:
    shown = {(one.kind, one.code) for one in ALL}
    made = raised()
    missing = {f"{kind} {code} ({made[kind, code]})" for kind, code in made.keys() - shown - ELSEWHERE.keys()}
    assert not missing, missing
    assert not shown & ELSEWHERE.keys()
    assert not ELSEWHERE.keys() - made.keys(), "no code raises it any more"


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_an_example_elsewhere_is_there(place: str) -> None:
    name, _, test = place.partition("::")
    functions = [one.name for one in ast.walk(ast.parse((ROOT / name).read_text()))
                 if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]  # fmt: skip
    assert test in functions


def test_every_class_is_raised_somewhere() -> None:
    bases = {"TidegateError", "UserError", "StoreError"}
    assert set(CLASSES) - {kind for kind, _ in raised()} - bases == {"DeadlineReached"}, "whose codes are computed"
    assert errors.FingerprintMismatch.exit_code == 2
