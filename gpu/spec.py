"""Everything the processes of a run need to know, as frozen values. Made by the run configuration, which holds the
defaults; nothing here has one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from gpu.environments.base import Environment
from gpu.environments.registry import make_environment
from gpu.fleet import FleetSettings
from gpu.generation.engine import Cached
from gpu.models.config import ModelSpec
from gpu.rollout.drain import DrainPolicy
from gpu.rollout.evaluation import Suite
from gpu.rollout.limits import Limits
from gpu.rollout.manager import ManagerSettings
from gpu.rollout.results import GroupFilter, keep_all, zero_variance
from gpu.rollout.source import PromptStream
from gpu.training.settings import TrainingSettings
from storage.errors import ConfigurationRefused


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The prompt stream over the environment's tasks; `epochs` None is endless."""

    environment: str
    options: Mapping[str, object]
    seed: int
    shuffle: bool
    epochs: int | None

    def environment_of(self) -> Environment:
        return make_environment(self.environment, self.options)

    def stream(self, environment: Environment) -> PromptStream:
        return PromptStream(len(environment), seed=self.seed, shuffle=self.shuffle, epochs=self.epochs)

    def fingerprint(self) -> str:
        """Digest of what an ordinal means."""
        environment = self.environment_of()
        rows = (environment.task(index) for index in range(len(environment)))
        return self.stream(environment).fingerprint(rows)


@dataclass(frozen=True, slots=True)
class SuiteSpec:
    """An evaluation suite: the first `tasks` tasks of an environment (None: all), `samples` rollouts each, which
    succeed above the reward `threshold`."""

    name: str
    environment: str
    options: Mapping[str, object]
    tasks: int | None
    samples: int
    temperature: float
    threshold: float

    def environment_of(self) -> Environment:
        return make_environment(self.environment, self.options)

    def suite(self) -> Suite:
        """Raises `ConfigurationRefused`."""
        size = len(self.environment_of())
        if self.tasks is not None and self.tasks > size:
            raise ConfigurationRefused(
                f"suite {self.name!r} takes {self.tasks} tasks of environment {self.environment!r}, which has {size}",
                expected=f"at most {size}, or null for all",
                action="lower the suite's tasks, or change the environment's options",
            )
        return Suite(self.name, size if self.tasks is None else self.tasks, self.samples, self.threshold)


@dataclass(frozen=True, slots=True)
class EvaluationSpec:
    """Every `every` steps and after the last one; None is never. An activation waits at most `deadline_s` seconds for
    evaluations, the end of the run `end_s`."""

    every: int | None
    deadline_s: float
    end_s: float
    suites: tuple[SuiteSpec, ...]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Resources of one process in Ray's terms, and its number of compute threads."""

    num_cpus: float
    num_gpus: float
    device: str
    threads: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`dtype` is a safetensors name; `in_flight_swap` False makes an engine finish its requests before an update."""

    slots: int
    max_length: int
    dtype: str
    cached: Cached
    in_flight_swap: bool
    temperature: float
    process: ProcessSpec


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    concurrency: int
    process: ProcessSpec


@dataclass(frozen=True, slots=True)
class Filter:
    """The verdict on a finished group: "none", "zero_variance", or a user's "module:function", which gets the rewards
    of the siblings and returns why the group is to be discarded, or "". A user's function may take its time and runs
    in threads of the manager; what it raises is tried again."""

    name: str

    @property
    def outside(self) -> bool:
        return self.name not in _FILTERS

    def function(self) -> GroupFilter:
        """Raises `ConfigurationRefused`."""
        if not self.outside:
            return _FILTERS[self.name]
        module, _, attribute = self.name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationRefused(
                f"rollout.filter {self.name!r}: {error}",
                expected=f"{', '.join(_FILTERS)}, or an importable module:function",
                action="install the package on every node, or correct the path",
            ) from error
        if not callable(found):
            raise ConfigurationRefused(
                f"rollout.filter {self.name!r} is a {type(found).__name__}",
                expected="a function of the siblings' rewards",
                action="correct the path",
            )
        return cast("GroupFilter", found)


_FILTERS: Mapping[str, GroupFilter] = {"none": keep_all, "zero_variance": zero_variance}


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The driver's numbers. `lease_s` bounds the wait for a batch, `hold_ttl_s` a hold without renewal, `alive_s` how
    long a process may not answer; a checkpoint is taken every `checkpoint_every` steps, and training stops when the
    last good one is `max_unsaved` steps behind. `redo` is "replay" or "requeue"."""

    num_steps: int
    lease_s: float
    hold_ttl_s: float
    alive_s: float
    drain: DrainPolicy
    checkpoint_every: int
    max_unsaved: int
    strict_redo: bool
    redo: str


@dataclass(frozen=True, slots=True)
class DeadlineSpec:
    """When an attempt of a flow run must end: `limit_s` seconds after its start (None: never), `grace_s` after SIGTERM
    or after the file `notice` appears and says no other number. `reserve_s` are kept for a publication, at least."""

    limit_s: float | None
    reserve_s: float
    grace_s: float
    notice: str | None


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run. `ray_address` and `namespace` say where its processes live."""

    run: str
    storage_url: str
    ray_address: str
    namespace: str
    start_s: float
    model: ModelSpec
    source: SourceSpec
    limits: Limits
    filter: Filter
    recovery: str
    manager: ManagerSettings
    fleet: FleetSettings
    engine: EngineSpec
    worker: WorkerSpec
    training: TrainingSettings
    trainer: ProcessSpec
    steps: StepSpec
    deadline: DeadlineSpec
    evaluation: EvaluationSpec
    fingerprints: Mapping[str, str]
    settings: Mapping[str, object]
