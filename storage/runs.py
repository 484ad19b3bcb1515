"""Where the parts of a run lie, and run.json: who the run is. run.json is created exclusively, never changes, and
carries a digest of what it says."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from storage.errors import (
    ArtifactCorrupt,
    ConfigurationRefused,
    FingerprintMismatch,
    ForkRefused,
    ObjectExists,
    ObjectMissing,
    RestoreNotFresh,
    RunExists,
    UnknownRun,
)
from storage.filesystem import Store
from storage.schema import FIELD_HASH, SCHEMA
from storage.upgrades import changed, changes

DIGEST = "digest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(run: str) -> None:
    """Raises `ConfigurationRefused` for a run name that is not a plain word."""
    if not _NAME.fullmatch(run):
        raise ConfigurationRefused(
            f"run name {run!r}",
            expected="letters, digits, '.', '_' and '-', at most 100, starting with a letter or digit",
            action="choose another run name",
        )


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that a run is a fork of; `storage` is a url without credentials, `digest` that of the manifest."""

    run: str
    storage: str
    step: int
    digest: str


class RunInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What gives a run its meaning. `fingerprints` (name -> digest) must be equal at every resume; `settings` are the
    first incarnation's other settings, kept for people and for `tidegate resume`. A fork has an `origin`; it is a run
    once its first segment, which only `storage.fork` writes, is there."""

    schema: int
    fields: str
    run: str
    created: float
    num_siblings: int
    staleness: int | None
    fingerprints: dict[str, str]
    settings: dict[str, object]
    origin: Origin | None = None


def make_run(
    *,
    run: str,
    created: float,
    num_siblings: int,
    staleness: int | None,
    fingerprints: dict[str, str],
    settings: dict[str, object],
) -> RunInfo:
    """A `RunInfo` of this program's schema. Raises `ConfigurationRefused` for a name that is not a plain word."""
    check_name(run)
    return RunInfo(SCHEMA, FIELD_HASH, run, created, num_siblings, staleness, fingerprints, settings)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested mappings that is not one."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    entries: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    for key, inner in entries.items():
        yield from flat(inner, f"{name}.{key}" if name else key)


ABSENT = "absent"


def setting_changes(info: RunInfo, since: Mapping[str, str], settings: Mapping[str, object]) -> dict[str, str]:
    """What differs between the settings in force and those of a new incarnation, by dotted name, as "old -> new". In
    force is what the run began with, and what the journal says was changed `since` (`Ledger.settings`)."""
    old = {name: str(value) for name, value in flat(info.settings)} | dict(since)
    stored = msgspec.json.decode(msgspec.json.encode(settings))  # as run.json has them
    new = {name: str(value) for name, value in flat(stored)}
    return {
        name: f"{old.get(name, ABSENT)} -> {new.get(name, ABSENT)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, ABSENT) != new.get(name, ABSENT)
    }


def changed_to(text: str) -> str:
    """The new value in "old -> new"."""
    return text.rpartition(" -> ")[2]


class RunPaths:
    """Keys of a run below the store's root."""

    def __init__(self, run: str) -> None:
        self.root = f"runs/{run}"
        self.info = f"{self.root}/run.json"
        self.journal = f"{self.root}/journal"
        self.low = f"{self.journal}/low"
        self.ledger = f"{self.root}/ledger"
        self.history = f"{self.root}/history"
        self.payload = f"{self.root}/payload"
        self.objects = f"{self.root}/objects"
        self.checkpoints = f"{self.root}/checkpoints"
        self.metrics = f"{self.root}/metrics"
        self.pins = f"{self.root}/pins"

    def segment(self, slot: int) -> str:
        return f"{self.journal}/{slot:012d}.arrow"

    def snapshot(self, slot: int, digest: str) -> str:
        return f"{self.ledger}/{slot:012d}-{digest[:16]}.arrow"

    def archive(self, name: str) -> str:
        return f"{self.history}/{name}.arrow"

    def block(self, name: str) -> str:
        return f"{self.payload}/{name}.arrow"

    def object(self, digest: str) -> str:
        return f"{self.objects}/{digest}"

    def manifest(self, name: str) -> str:
        return f"{self.checkpoints}/{name}"

    def pin(self, manifest: str, name: str) -> str:
        return f"{self.pins}/{manifest}.{name}.json"


def check_fresh(store: Store, run: str) -> None:
    """A run without run.json has no journal either: records without the description that gives them a meaning are
    never taken over by a new run. Raises `RestoreNotFresh`."""
    paths = RunPaths(run)
    left = next((key for key in (paths.segment(0), paths.low) if store.size(key) is not None), None)
    if left is not None and store.size(paths.info) is None:
        raise RestoreNotFresh(
            f"{left} in {store.url}, without {paths.info}",
            expected="the run's description beside its journal, or no journal",
            action="restore run.json from a copy, or choose another name",
        )


def create_run(store: Store, info: RunInfo) -> None:
    """Create run.json. Raises `RunExists`, `RestoreNotFresh`."""
    check_fresh(store, info.run)
    try:
        data = msgspec.json.encode({**msgspec.to_builtins(info), DIGEST: _digest(info)})
        store.create(RunPaths(info.run).info, msgspec.json.format(data, indent=1))
    except ObjectExists as error:
        raise RunExists(
            f"run {info.run!r} in {store.url}", expected="a new name", action="resume it, or choose another name"
        ) from error


def _digest(info: RunInfo) -> str:
    return hashlib.sha256(msgspec.json.encode(info)).hexdigest()


def list_runs(store: Store) -> list[str]:
    """Names of runs, from a listing: a help for people."""
    return sorted({key.split("/")[1] for key in store.list("runs") if key.endswith("/run.json")})


def open_run(store: Store, run: str) -> RunInfo:
    """Read and check run.json. Raises `UnknownRun`, `SchemaUnsupported`, `ArtifactCorrupt`, `ConfigurationRefused`."""
    check_name(run)
    try:
        data = store.read(RunPaths(run).info)
    except ObjectMissing as error:
        known = ", ".join(list_runs(store)[:10]) or "no run"
        raise UnknownRun(
            f"no run {run!r} in {store.url}, which holds {known}",
            expected="an existing run",
            action="check the name and the storage url",
        ) from error
    try:
        stated = msgspec.json.decode(data, type=dict[str, object])
        found = (stated["schema"], stated["fields"])
    except (msgspec.DecodeError, KeyError) as error:
        raise _unreadable(run, str(error)) from error
    steps = changes(f"run {run!r}", found, (SCHEMA, FIELD_HASH))
    digest = stated.pop(DIGEST, "none")
    actual = hashlib.sha256(msgspec.json.encode(stated)).hexdigest()
    if actual != digest:
        raise _unreadable(run, f"sha256 {actual[:16]}… where it says {str(digest)[:16]}…")
    if steps:
        stated = changed(steps, "run", stated)[1] | {"schema": SCHEMA, "fields": FIELD_HASH}
    try:
        info = msgspec.convert(stated, RunInfo)
    except msgspec.ValidationError as error:
        raise _unreadable(run, str(error)) from error
    if info.run != run:
        raise ArtifactCorrupt(
            f"{RunPaths(run).info} describes run {info.run!r}",
            expected=f"run {run!r}",
            action="a run cannot be copied under another name; restore the object",
            code="mixed_cut",
        )
    return info


def check_begun(store: Store, info: RunInfo) -> None:
    """Raises `ForkRefused` for a fork that was not finished: it is not a run, and must not become another one."""
    if info.origin is None or store.size(RunPaths(info.run).segment(0)) is not None:
        return
    came = info.origin
    raise ForkRefused(
        f"run {info.run!r} is the unfinished fork of {came.run}@{came.step} in {came.storage}",
        expected="a fork that is complete",
        action=f"finish it: tidegate fork {came.run}@{came.step} {info.run}",
        code="fork_unfinished",
    )


def _unreadable(run: str, found: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"{RunPaths(run).info} is not as it was written: {found}",
        expected="the run description of its first day",
        action="restore the object from a copy",
        code="digest",
    )


def check_fingerprints(
    info: RunInfo, fingerprints: Mapping[str, str], num_siblings: int, staleness: int | None
) -> None:
    """Refuse to continue a run with data of another meaning. Raises `FingerprintMismatch`."""
    wanted = {**fingerprints, "num_siblings": str(num_siblings), "staleness": str(staleness)}
    stored = {**info.fingerprints, "num_siblings": str(info.num_siblings), "staleness": str(info.staleness)}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise FingerprintMismatch(
                f"{name} = {wanted.get(name, 'absent')[:60]}",
                expected=f"{name} = {stored.get(name, 'absent')[:60]}, as run {info.run!r} was started with",
                action="resume with the settings of the run, or start a new run",
                code=f"fingerprint_{name}",
            )
