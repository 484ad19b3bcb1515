"""The configuration of a run: the flow's parameter and the form in the UI; its sections and defaults are in `sections`.

Times are seconds, sizes bytes, capacities groups unless a description says otherwise. `RunConfig.spec` checks what can
be checked without starting anything and turns the configuration into the values the processes get.
"""

from __future__ import annotations

import hashlib
import json

from pydantic import Field

from flows.sections import (
    CheckpointConfig,
    ClusterConfig,
    Count,
    DrainConfig,
    EnvironmentConfig,
    EvaluationConfig,
    FlowConfig,
    GenerationConfig,
    ModelConfig,
    Part,
    RetentionConfig,
    RolloutConfig,
    StorageConfig,
    TrainingConfig,
)
from gpu.environments.registry import topology_of
from gpu.fleet import FleetSettings
from gpu.generation.engine import Cached
from gpu.models.config import ModelSpec, find, load_config
from gpu.rollout.capabilities import check_trainable
from gpu.rollout.committer import FlushSettings
from gpu.rollout.drain import Drain, DrainAction, DrainPolicy
from gpu.rollout.evaluation import check_suites
from gpu.rollout.limits import Limits, Order, Submission, check_group_bytes, check_limits
from gpu.rollout.manager import ManagerSettings
from gpu.spec import (
    DeadlineSpec,
    EngineSpec,
    EvaluationSpec,
    Filter,
    ProcessSpec,
    RunSpec,
    SourceSpec,
    StepSpec,
    SuiteSpec,
    WorkerSpec,
)
from gpu.training.settings import OptimizerSettings, TrainingSettings
from storage.errors import ConfigurationRefused
from storage.opening import open_store
from storage.retention import Retention

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class RunConfig(Part):
    """A run of asynchronous RL. A run of the same name is resumed."""

    run: str | None = Field(default=None, title="Run name", description="null: named after the flow run")
    seed: Count = Field(default=0, description="Of prompts, initial weights and sampling")
    model: ModelConfig = ModelConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    generation: GenerationConfig = GenerationConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    drain: DrainConfig = DrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    retention: RetentionConfig = RetentionConfig()
    storage: StorageConfig = StorageConfig()
    cluster: ClusterConfig = ClusterConfig()
    flow: FlowConfig = FlowConfig()

    def limits(self) -> Limits:
        """Raises `ConfigurationRefused` for plain mode, which has none."""
        one, storage = self.rollout, self.storage
        source = self._source()
        capabilities = source.stream(source.environment_of()).capabilities
        executing, retained, completed = check_trainable(capabilities, one.executing, one.retained, one.completed)
        return Limits(
            num_siblings=one.siblings,
            batch=one.batch,
            staleness=one.staleness,
            submission=Submission(one.submission),
            order=Order(one.order),
            max_executing=executing,
            max_retained=retained,
            max_completed=completed,
            max_hot_bytes=one.hot_bytes,
            eviction_cap=one.eviction_cap,
            prefetch=one.prefetch,
            max_backoff=one.backoff,
            max_postprocessing=one.postprocessing,
            max_attempts=one.attempts,
            max_losses=one.losses,
            backoff_base_s=one.backoff_base,
            backoff_max_s=one.backoff_max,
            undurable_age_s=storage.undurable_age,
            undurable_bytes=storage.undurable_bytes,
            discard_end_of_source=one.discard_rest,
        )

    def check(self) -> list[str]:
        """Refuse what cannot work, before anything is started or written; returns warnings."""
        limits = self.limits()
        warnings = check_limits(limits)
        Filter(self.rollout.filter).function()
        self._check_evaluation(limits)
        environment = self._source().environment_of()
        tokens = min(self.generation.max_length, environment.max_new_tokens) * environment.max_turns
        check_group_bytes(limits, self.rollout.siblings * (BYTES_PER_ROLLOUT + BYTES_PER_TOKEN * tokens))
        length = load_config(find(self._model())).max_position_embeddings
        if self.generation.max_length > length:
            raise ConfigurationRefused(
                f"generation.max_length = {self.generation.max_length}",
                expected=f"at most {length}, the model's own limit",
                action="lower generation.max_length",
            )
        if self.checkpoint.max_unsaved < self.checkpoint.every:
            raise ConfigurationRefused(
                f"checkpoint.max_unsaved = {self.checkpoint.max_unsaved} < checkpoint.every = {self.checkpoint.every}:"
                " training would stop before the first checkpoint",
                expected="max_unsaved >= every",
                action="change the run configuration",
                code="deadlock",
            )
        if self.checkpoint.deadline is not None and self.checkpoint.deadline <= self.checkpoint.reserve:
            raise ConfigurationRefused(
                f"checkpoint.deadline = {self.checkpoint.deadline:g} s <= checkpoint.reserve ="
                f" {self.checkpoint.reserve:g} s: no step would ever begin",
                expected="deadline > reserve",
                action="change the run configuration",
                code="deadlock",
            )
        if self.generation.in_flight_updates is False and self.drain.mode == "none":
            raise ConfigurationRefused(
                "drain.mode = none with generation.in_flight_updates = false: engines would change weights under open"
                " model calls, which they cannot",
                expected="drain.mode boundary or frontier",
                action="change the run configuration",
                code="deadlock",
            )
        return warnings

    def _check_evaluation(self, limits: Limits) -> None:
        one = self._evaluation_spec()
        names = [suite.name for suite in one.suites]
        if len(set(names)) != len(names) or (one.every is not None and not names):
            raise ConfigurationRefused(
                f"evaluation.suites named {names} with evaluation.every = {one.every}",
                expected="suites with distinct names, at least one when there is something to evaluate",
                action="name the suites apart, add one, or set evaluation.every to null",
            )
        check_suites(limits, [suite.suite() for suite in one.suites])

    def _evaluation_spec(self) -> EvaluationSpec:
        one = self.evaluation
        suites = [
            SuiteSpec(
                suite.name,
                suite.environment,
                suite.options,
                suite.tasks,
                suite.samples,
                suite.temperature,
                suite.threshold,
            )
            for suite in one.suites
        ]
        return EvaluationSpec(one.every, one.deadline, one.end_deadline, tuple(suites))

    def _model(self) -> ModelSpec:
        return ModelSpec(self.model.name, self.seed, self.model.cache)

    def _source(self) -> SourceSpec:
        one = self.environment
        return SourceSpec(one.name, one.options, self.seed, one.shuffle, one.epochs)

    def fingerprints(self) -> dict[str, str]:
        """What must not change at a resume: other data, another model or another environment is another run."""
        model = hashlib.sha256(json.dumps([self.model.name, self.seed]).encode()).hexdigest()
        return {
            "source": self._source().fingerprint(),
            "model": model,
            "environment": f"{self.environment.name} {json.dumps(self.environment.options, sort_keys=True)}",
            "resources": topology_of(self._source().environment_of()).fingerprint(),
        }

    def resolved(self) -> RunConfig:
        """With every `auto` of the arithmetic replaced by what this machine does well; a run keeps it for life."""
        dtype, autocast = self.generation.dtype, self.training.autocast
        if dtype == "auto":
            dtype = "bfloat16" if self._bfloat16_pays(self.generation.device) else "float32"
        if autocast == "auto":
            autocast = "on" if self._bfloat16_pays(self.training.device) else "off"
        return self.model_copy(
            update={
                "generation": self.generation.model_copy(update={"dtype": dtype}),
                "training": self.training.model_copy(update={"autocast": autocast}),
            }
        )

    def _bfloat16_pays(self, device: str) -> bool:
        if self.model.name == "tiny":
            return False
        if device != "cpu":
            return True
        from gpu.precision import fast_bfloat16  # imports torch, which a driver needs for nothing else

        return fast_bfloat16()

    def spec(self, run: str) -> RunSpec:
        """The values the processes get. Raises `ConfigurationRefused` and other `UserError`s."""
        self.check()
        one, cluster = self.resolved(), self.cluster
        generation = one.generation
        return RunSpec(
            run=run,
            storage_url=open_store(one.storage.url).url,
            ray_address=cluster.address,
            namespace=cluster.namespace,
            start_s=cluster.start_deadline,
            model=self._model(),
            source=self._source(),
            limits=self.limits(),
            filter=Filter(self.rollout.filter),
            recovery=self.rollout.recovery,
            manager=ManagerSettings(
                FlushSettings(one.storage.flush_interval, one.storage.flush_bytes, one.storage.retry_backoff),
                cluster.driver_silence,
                one.storage.commit_deadline,
                one.storage.snapshot_every,
                self.retention_settings(),
            ),
            fleet=FleetSettings(
                generation.engines,
                generation.workers,
                cluster.activate_deadline,
                cluster.restart_pause,
                cluster.max_failures,
            ),
            engine=one._engine_spec(),
            worker=WorkerSpec(generation.concurrency, ProcessSpec(generation.cpus, 0.0, "cpu", 1)),
            training=one._training_settings(),
            trainer=ProcessSpec(one.training.cpus, one.training.gpus, one.training.device, one.training.threads),
            steps=one._step_spec(),
            deadline=one._deadline_spec(),
            evaluation=one._evaluation_spec(),
            fingerprints=self.fingerprints(),
            settings=one.model_dump(mode="json"),
        )

    def retention_settings(self) -> Retention:
        one = self.retention
        return Retention(one.last, one.every, one.payload, one.pin_hours * 3600)

    def _engine_spec(self) -> EngineSpec:
        one = self.generation
        return EngineSpec(
            one.slots,
            one.max_length,
            DTYPES[one.dtype],
            Cached(one.cache_at_update),
            one.in_flight_updates,
            one.temperature,
            ProcessSpec(one.cpus, one.gpus, one.device, one.threads),
        )

    def _training_settings(self) -> TrainingSettings:
        one = self.training
        return TrainingSettings(
            OptimizerSettings(
                one.learning_rate, one.beta1, one.beta2, one.epsilon, one.weight_decay, one.warmup, one.max_grad_norm
            ),
            one.clip_low,
            one.clip_high,
            one.drop_zero_variance,
            one.micro_positions,
            one.autocast == "on",
            DTYPES[self.generation.dtype],
        )

    def _step_spec(self) -> StepSpec:
        cluster, checkpoint = self.cluster, self.checkpoint
        return StepSpec(
            self.training.steps,
            cluster.lease_deadline,
            cluster.hold_ttl,
            cluster.alive_deadline,
            DrainPolicy(Drain(self.drain.mode), self.drain.deadline, DrainAction(self.drain.action)),
            checkpoint.every,
            checkpoint.max_unsaved,
            checkpoint.strict_redo,
            checkpoint.redo,
        )

    def _deadline_spec(self) -> DeadlineSpec:
        one = self.checkpoint
        return DeadlineSpec(one.deadline, one.reserve, one.grace, one.notice)


BYTES_PER_ROLLOUT = 256
BYTES_PER_TOKEN = 9
"""Payload of a turn: int32 id, float32 logprob and int8 mask per token, and the row around them."""
