"""The messages between a run and its hosts: JSON, one structure per route, schema 1.

Unknown fields, other versions and names that are not plain paths refuse before anything is done, saying what is
supported. Every answer, refusals included, carries the host's name and the boot id of its process.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from gpu.environments.participants.errors import BY_NAME, HostFailed, MessageInvalid
from storage.errors import SchemaUnsupported, TidegateError

SCHEMA = 1
_PART = r"[A-Za-z0-9][A-Za-z0-9._@~-]*"
NAME = rf"^{_PART}(/{_PART})*\Z"
"""Parts between slashes begin with a letter or a digit: never a root, `.`, `..` or an empty part."""

Name = Annotated[str, msgspec.Meta(pattern=NAME, max_length=512)]
Id = Annotated[str, msgspec.Meta(pattern=rf"^{_PART}\Z", max_length=128)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what messages are made of."""


class Message(Part, frozen=True, kw_only=True):
    """Base of all messages."""

    schema_version: int = SCHEMA


class Instance(Part, frozen=True, kw_only=True):
    """One process of a host. `boot` is another one after every start."""

    name: Id
    boot: Id

    def __str__(self) -> str:
        return f"{self.name} (boot {self.boot})"


class Answer(Message, frozen=True, kw_only=True):
    """What a host says; plain where there is nothing to say but that it is done."""

    instance: Instance


class Failure(Answer, frozen=True, kw_only=True):
    error: str
    found: str
    expected: str
    action: str
    code: str


# ---------------------------------------------------------------------- sessions


class Held(Part, frozen=True, kw_only=True):
    """A claim: who may use a session."""

    incarnation: Count
    attempt: Count


class Asked(Part, frozen=True, kw_only=True):
    """A request to a session; see `gpu.environments.resources.Request`."""

    id: Name
    operation: str
    arguments: bytes
    revision: Count
    reads: bool


class Start(Message, frozen=True, kw_only=True):
    """`first`: no attempt has used a session of this name before, on any host."""

    session: Name
    claim: Held
    task: bytes
    seed: int
    first: bool


class Claim(Message, frozen=True, kw_only=True):
    """Also what an export asks for."""

    session: Name
    claim: Held


class Call(Message, frozen=True, kw_only=True):
    """Also what a standing asks for."""

    session: Name
    claim: Held
    request: Asked


class Restore(Message, frozen=True, kw_only=True):
    """One session, from an export of that session."""

    session: Name
    claim: Held
    task: bytes
    seed: int
    revision: Count
    state: bytes


class Result(Part, frozen=True, kw_only=True):
    """What an attempt ended with. `content` is a JSON object; `capture` and `call` are the key of its captured tokens
    and its last model call, both or neither."""

    content: bytes
    capture: str | None = None
    call: str | None = None


class End(Message, frozen=True, kw_only=True):
    """With a result, the host keeps that and the session until it is acknowledged; `claim` says whose it is."""

    session: Name
    claim: Held | None = None
    result: Result | None = None


class Claimed(Answer, frozen=True, kw_only=True):
    revision: int | None


class Replied(Answer, frozen=True, kw_only=True):
    content: bytes
    revision: int


class Stood(Answer, frozen=True, kw_only=True):
    standing: str
    content: bytes | None = None
    revision: int | None = None


class Exported(Answer, frozen=True, kw_only=True):
    revision: int
    state: bytes


# ---------------------------------------------------------------------- completed results


class Receipt(Part, frozen=True, kw_only=True):
    """Proof of a completed result: whose it is, `generation` (the number of that begin in the host's process), its
    own identity, and the sha256 of its canonical JSON."""

    session: Name
    incarnation: Count
    attempt: Count
    generation: Annotated[int, msgspec.Meta(ge=1)]
    result: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    digest: Digest
    capture: str | None = None
    call: str | None = None


class Completed(Answer, frozen=True, kw_only=True):
    """`receipt` is None when a session ended without a result."""

    receipt: Receipt | None


class Retained(Part, frozen=True, kw_only=True):
    receipt: Receipt
    content: bytes


class Unacknowledged(Answer, frozen=True, kw_only=True):
    results: tuple[Retained, ...]


class Acknowledge(Message, frozen=True, kw_only=True):
    """`to` is the process that issued the receipts; another one refuses."""

    to: Instance
    receipts: tuple[Receipt, ...]


class Acknowledged(Answer, frozen=True, kw_only=True):
    """`new` or `duplicate` for each receipt, in order."""

    outcomes: tuple[str, ...]


class Forget(Message, frozen=True, kw_only=True):
    """Sessions whose attempts are all over and of which nothing is owed."""

    sessions: tuple[Name, ...]


# ---------------------------------------------------------------------- checkpoint control


class Entry(Part, frozen=True, kw_only=True):
    session: Name
    revision: Count
    digest: Digest
    size: Count


class Manifest(Part, frozen=True, kw_only=True):
    """Everything that one participant saved under one checkpoint. `digest` is of all the other fields."""

    checkpoint: Id
    component: str
    name: Id
    entries: tuple[Entry, ...]
    digest: str = ""


class Control(Message, frozen=True, kw_only=True):
    """Prepare or commit. `deadline` in Unix seconds is also the end of the lease."""

    checkpoint: Id
    deadline: float


class Load(Control, frozen=True, kw_only=True):
    """Restore: `exports` run parallel to the manifest's entries. `checkpoint` is an id of its own, never the saved
    one."""

    manifest: Manifest
    exports: tuple[bytes, ...]


class Release(Message, frozen=True, kw_only=True):
    """Resume or abort."""

    checkpoint: Id


class Fetch(Message, frozen=True, kw_only=True):
    """One export of a committed checkpoint."""

    checkpoint: Id
    session: Name


class Saved(Answer, frozen=True, kw_only=True):
    """One session as a commit saved it, whole."""

    data: bytes


class Controlled(Answer, frozen=True, kw_only=True):
    """`outcome` is how a checkpoint ended, `manifest` what a commit saved, `lease_s` what is left of the lease."""

    phase: str
    checkpoint: str | None = None
    outcome: str | None = None
    manifest: Manifest | None = None
    lease_s: float | None = None


# ---------------------------------------------------------------------- bytes

Kind = TypeVar("Kind", bound=Message)


class _Versioned(msgspec.Struct):
    schema_version: msgspec.Raw = msgspec.Raw()


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """Raises `SchemaUnsupported` for another version, `MessageInvalid` for anything that is not such a message."""
    try:
        version = bytes(msgspec.json.decode(data, type=_Versioned).schema_version)
        if version == str(SCHEMA).encode():
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise MessageInvalid(
            f"{kind.__name__}: {error}",
            expected=f"JSON with the fields {fields} of schema {SCHEMA}",
            action="let both sides speak the same version of the protocol",
        ) from error
    raise SchemaUnsupported(
        f"{kind.__name__} with schema_version {version.decode() or 'missing'}",
        expected=f"schema_version {SCHEMA}, the only supported one",
        action="let both sides speak the same version of the protocol",
    )


def is_name(text: str) -> bool:
    return len(text) <= 512 and re.search(NAME, text) is not None


def failure(instance: Instance, error: TidegateError) -> Failure:
    return Failure(
        instance=instance,
        error=type(error).__name__,
        found=error.found,
        expected=error.expected,
        action=error.action,
        code=error.code,
    )


def raised(said: Failure) -> TidegateError:
    """The error that a failure reports."""
    kind: type[TidegateError] = BY_NAME.get(said.error, HostFailed)
    arguments: dict[str, Any] = {"expected": said.expected, "action": said.action, "code": said.code}
    return kind(said.found, **arguments)
