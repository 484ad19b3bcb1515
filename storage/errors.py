"""One hierarchy of errors for the whole project.

Every error says what was found, what was expected and what to do. Each class is also the standard Python type a caller
would expect. `exit_code` is what the command line returns: 2 when the user can mend the input, 1 for a fault.
"""

from __future__ import annotations

from typing import Any


class TidegateError(Exception):
    """Base of all errors. `code` is a stable reason code that tests and tools can match."""

    exit_code = 1
    default_code = "error"

    def __init__(self, found: str, *, expected: str, action: str, code: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.action = action
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"[{self.code}] found: {self.found}; expected: {self.expected}; do: {self.action}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries; the default protocol would drop the keyword arguments.
        return (_rebuild, (type(self), self.found, self.expected, self.action, self.code))


def _rebuild(cls: type[TidegateError], found: str, expected: str, action: str, code: str) -> TidegateError:
    return cls(found, expected=expected, action=action, code=code)


class UserError(TidegateError, ValueError):
    """The input can be mended by the user; nothing was written."""

    exit_code = 2
    default_code = "user"


class QuarantineRefused(UserError):
    """A release of groups that are not quarantined, or of a run that nobody drives."""

    default_code = "quarantine"


class ConfigurationRefused(UserError):
    """A configuration that cannot work, with the arithmetic."""

    default_code = "configuration"


class UnknownRun(UserError):
    """No run of that name exists in the store."""

    default_code = "unknown_run"


class UnknownCheckpoint(UserError):
    """The run has no published checkpoint of that step."""

    default_code = "unknown_checkpoint"


class ForkRefused(UserError):
    """A fork that would not mean what it says: of a damaged journal, or one that was not finished."""

    default_code = "fork"


class RunExists(UserError):
    """A run of that name exists already."""

    default_code = "run_exists"


class RestoreNotFresh(UserError):
    """A new run where the records of another one lie."""

    default_code = "restore_not_fresh"


class StorageUnusable(UserError):
    """The store cannot be opened, read, written, or cannot create exclusively."""

    default_code = "storage_unusable"


class ResourceUnavailable(UserError):
    """What was asked of the machine or cluster is not there: a GPU, a port, an address, a package."""

    default_code = "resource_unavailable"


class SchemaUnsupported(UserError):
    """Data of a schema this version cannot read. Nothing on disk was changed."""

    default_code = "schema_unsupported"


class FingerprintMismatch(UserError):
    """The run was started with data, configuration or environment of another meaning."""

    default_code = "fingerprint"


class RunBusy(UserError):
    """Another live flow run drives this run."""

    default_code = "run_busy"


class StoreError(TidegateError, OSError):
    """A storage operation did not succeed."""

    default_code = "store"


class ObjectExists(StoreError, FileExistsError):
    """Exclusive creation was refused because the object is there."""

    default_code = "object_exists"


class ObjectMissing(StoreError, FileNotFoundError):
    """The object is not there."""

    default_code = "object_missing"


class PreconditionFailed(StoreError):
    """A compare-and-swap found another value."""

    default_code = "precondition"


class StoreUnavailable(StoreError):
    """The store did not answer or has no room; the same call may succeed later. The outcome is known: not applied."""

    default_code = "store_unavailable"


class CommitUnknown(StoreError):
    """It is not known whether a write took effect: stop acting, keep probing, never clean up."""

    default_code = "commit_unknown"


class UploadLost(StoreError):
    """The process that wrote a checkpoint died. What it wrote is whole and referenced by nobody; write it again."""

    default_code = "upload_lost"


class CheckpointRefused(StoreError):
    """A checkpoint that rests on objects which somebody may still be deleting; the next one takes its place."""

    default_code = "checkpoint_refused"


class ArtifactCorrupt(TidegateError, ValueError):
    """A stored object is not what its digest, size, name or chain says."""

    default_code = "artifact_corrupt"


class SlotsRetired(TidegateError, LookupError):
    """A journal slot was deleted because nothing needs it any more; what looks like the end is not."""

    default_code = "slots_retired"


class LedgerInvalid(TidegateError, ValueError):
    """The records of a journal contradict each other."""

    default_code = "ledger_invalid"


class IllegalTransition(LedgerInvalid):
    """A record that the state machine of its subject does not allow."""

    default_code = "illegal_transition"


class TwoOwners(LedgerInvalid):
    """A group, rollout or token row has two owners."""

    default_code = "two_owners"


class AttemptReused(LedgerInvalid):
    """An attempt number was minted twice for one rollout."""

    default_code = "attempt_reused"


class ContinuationInvalid(TidegateError, ValueError):
    """A turn boundary that does not continue the rollout it names."""

    default_code = "continuation"


class ResourceInvalid(TidegateError, ValueError):
    """A request, an export or a session that does not fit the resource it names."""

    default_code = "resource"


class AckMismatch(TidegateError, ValueError):
    """A receipt or an acknowledgement that does not fit the sealed attempt that it names."""

    default_code = "acknowledgement"


class ReferenceInvalid(TidegateError, ValueError):
    """A reference to token rows that do not exist or do not fit together."""

    default_code = "reference"


class LineageInvalid(TidegateError, ValueError):
    """Policy versions that are unknown or out of order, or model calls that do not follow each other."""

    default_code = "lineage"


class StalenessExceeded(TidegateError, ValueError):
    """A group was trained beyond the staleness bound of its run."""

    default_code = "staleness"


class RestoreRefused(TidegateError, RuntimeError):
    """No checkpoint could be restored, or a redone step differs under the strict policy."""

    default_code = "restore"


class RunFenced(TidegateError, RuntimeError):
    """Somebody newer owns the run. Terminal: stop at once, touch nothing, never retry."""

    default_code = "fenced"


class LeaseRefused(TidegateError, RuntimeError):
    """A commit or rollback that does not fit the open lease."""

    default_code = "lease"


class HoldRefused(TidegateError, RuntimeError):
    """An effect under a hold that has expired, was released, or was voided."""

    default_code = "hold"


class TrainingDiverged(TidegateError, ArithmeticError):
    """A step whose gradient is not finite; nothing was changed."""

    default_code = "diverged"


class DeadlineExceeded(TidegateError, TimeoutError):
    """A wait reached its deadline; the message names what did not end."""

    default_code = "deadline"


class DeadlineReached(TidegateError, TimeoutError):
    """An attempt ended before its time was over; the message says what it published, or that it did not and why."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, try again
    default_code = "deadline_reached"


class ActorLost(TidegateError, RuntimeError):
    """A process of the run died; the message names it and who resumes."""

    default_code = "actor_lost"


class WeightsUnavailable(ActorLost):
    """The trainer that holds a version's weights is dead or has others; the driver's retry restores it."""

    default_code = "weights"


class EngineFailed(TidegateError, RuntimeError):
    """A generation engine failed inside its process; it is replaced like one that died."""

    default_code = "engine"
