"""Before anything runs: the run's description exists and means the same, or is created on a store that keeps its
promises."""

from __future__ import annotations

import logging

from gpu.environments.registry import recipe_fingerprint, topology_of
from gpu.rollout.manager import RolloutManager, open_manager
from gpu.spec import RunSpec
from storage.clock import Clock
from storage.errors import ResourceUnavailable, RunExists, UnknownRun
from storage.filesystem import Store
from storage.ledger import Recipe
from storage.opening import open_store, probe, reach
from storage.runs import (
    RunInfo,
    RunPaths,
    check_begun,
    check_fingerprints,
    check_fresh,
    check_name,
    create_run,
    make_run,
    open_run,
    setting_changes,
)
from storage.schema import ConfigChanged

log = logging.getLogger(__name__)


def preflight(spec: RunSpec) -> RunInfo | None:
    """What can be refused before any process is started; reads only. The run, or None when it is new.

    Raises `FingerprintMismatch`, `SchemaUnsupported`, `RestoreNotFresh`, `StorageUnusable`, `ResourceUnavailable`."""
    if spec.storage_url.startswith("memory:"):
        raise ResourceUnavailable(
            f"storage {spec.storage_url} lives in one process",
            expected="a store that every process of the run reaches",
            action="set storage.url to a folder or another shared place",
        )
    check_name(spec.run)
    store = open_store(spec.storage_url)
    reach(store, RunPaths(spec.run).root)
    return _existing(store, spec)


def _existing(store: Store, spec: RunSpec) -> RunInfo | None:
    try:
        return _opened(store, spec)
    except UnknownRun:
        check_fresh(store, spec.run)
        return None


def prepare_run(store: Store, spec: RunSpec, clock: Clock) -> RunInfo:
    """Open the run, or create it. Raises `FingerprintMismatch`, `SchemaUnsupported`, `StorageUnusable`, having written
    nothing."""
    found = _existing(store, spec)
    if found is not None:
        return found
    info = make_run(
        run=spec.run,
        created=clock.wall(),
        num_siblings=spec.limits.num_siblings,
        staleness=spec.limits.staleness,
        fingerprints=dict(spec.fingerprints),
        settings=dict(spec.settings),
    )
    probe(store, RunPaths(spec.run).root)
    try:
        create_run(store, info)
        return info
    except RunExists:  # somebody created it at the same moment
        return _opened(store, spec)


def _opened(store: Store, spec: RunSpec) -> RunInfo:
    info = open_run(store, spec.run)
    check_fingerprints(info, spec.fingerprints, spec.limits.num_siblings, spec.limits.staleness)
    check_begun(store, info)
    return info


def claim_manager(store: Store, spec: RunSpec, clock: Clock, owner: str, reason: str) -> RolloutManager:
    """A new incarnation of the run; settings that differ from those in force are its first record. Blocks on
    storage."""
    info = prepare_run(store, spec, clock)
    environment = spec.source.environment_of()
    manager = open_manager(
        store,
        info,
        spec.limits,
        clock,
        spec.manager,
        owner=owner,
        reason=reason,
        length=spec.source.stream(environment).length,
        group_filter=spec.filter.function(),
        judged_outside=spec.filter.outside,
        recipe=Recipe(environment.recovery or spec.recovery, recipe_fingerprint(environment)),
        suites=[suite.suite() for suite in spec.evaluation.suites],
        topology=topology_of(environment),
    )
    ledger = manager.control.ledger
    changes = setting_changes(info, ledger.settings, spec.settings)
    if changes and not ledger.finished:
        manager.control.books.record(ConfigChanged(changes))
        log.info("op=claim run=%s settings=%s", spec.run, changes)
    return manager
