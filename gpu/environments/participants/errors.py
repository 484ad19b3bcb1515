"""What goes wrong between a run and its external participants, and how it travels.

A refusal crosses HTTP by the name of its class and is raised as that class on the other side; a name that is not known
here becomes `HostFailed`.
"""

from __future__ import annotations

from storage import errors
from storage.errors import TidegateError, UserError


class CheckpointConflict(TidegateError, RuntimeError):
    """Another checkpoint is active, or the same one was asked for with other content."""

    default_code = "checkpoint_conflict"


class StaleCheckpoint(TidegateError, RuntimeError):
    """The checkpoint is over on this host, and its id is spent for ever."""

    default_code = "stale_checkpoint"


class WrongPhase(TidegateError, RuntimeError):
    """An operation that the phase of the host does not allow."""

    default_code = "wrong_phase"


class CheckpointBlocked(TidegateError, RuntimeError):
    """Something on the host cannot be saved as it is; the message names it."""

    default_code = "checkpoint_blocked"


class ResumeOwed(TidegateError, RuntimeError):
    """A host is not known to be open again after a checkpoint; no other checkpoint may begin before that."""

    default_code = "resume_owed"


class CompletionRefused(TidegateError, ValueError):
    """A result, a receipt or a begin that contradicts what the host knows of the attempt. Nothing was changed."""

    default_code = "completion"


class HostReplaced(TidegateError, RuntimeError):
    """The process that a request was meant for is gone: its name answers with another boot id."""

    default_code = "host_replaced"


class HostUnreachable(TidegateError, ConnectionError):
    """A host did not answer. What was asked changes nothing, or may be asked again."""

    default_code = "host_unreachable"


class OutcomeUnknown(TidegateError, ConnectionError):
    """A change was sent and no answer came: it may have taken effect. Ask for its standing; never send it again."""

    default_code = "outcome_unknown"


class HostFailed(TidegateError, RuntimeError):
    """The code of a host raised something that is no refusal."""

    default_code = "host_failed"


class MessageInvalid(TidegateError, ValueError):
    """A message with unknown, missing or malformed fields."""

    default_code = "message"


class AccessRefused(UserError):
    """A request without the bearer token that the host wants."""

    default_code = "access"


STATUS: dict[type[TidegateError], int] = {
    AccessRefused: 401,
    MessageInvalid: 400,
    errors.SchemaUnsupported: 400,
    errors.ConfigurationRefused: 400,
    HostFailed: 500,
    CheckpointConflict: 409,
    StaleCheckpoint: 409,
    WrongPhase: 409,
    CheckpointBlocked: 409,
    CompletionRefused: 409,
    HostReplaced: 409,
    errors.ResourceInvalid: 409,
    errors.ArtifactCorrupt: 409,
    errors.FingerprintMismatch: 409,
    errors.RestoreNotFresh: 409,
    errors.DeadlineExceeded: 409,
}
"""The HTTP status of each class that a host answers with."""

BY_NAME = {kind.__name__: kind for kind in STATUS}
