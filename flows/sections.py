"""The sections of a run's configuration, as the form in the UI shows them. The only place of defaults.

Times are seconds, sizes bytes, capacities groups unless a description says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Part(BaseModel):
    """A section of the form; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StorageConfig(Part):
    url: str = Field(
        default=".tidegate/store",
        title="Storage url",
        description="A folder, s3://bucket/prefix[?endpoint=&region=&credentials=] or memory://; holds all runs",
    )
    flush_interval: Seconds = Field(
        default=0.25, description="Journal records nobody waits for become durable after this long"
    )
    flush_bytes: Positive = Field(default=4 << 20, description="... or when this many bytes are pending")
    retry_backoff: Seconds = Field(
        default=5.0, description="Longest pause between two tries of a write with unknown outcome"
    )
    commit_deadline: Seconds = Field(
        default=300.0, description="How long a call waits for durability before it reports"
    )
    undurable_age: Seconds = Field(
        default=10.0, description="Admission closes when the journal's tail is older than this"
    )
    undurable_bytes: Positive = Field(default=64 << 20, description="... or larger than this")
    snapshot_every: Positive = Field(
        default=64, description="Segments between ledger snapshots; a restore reads about so many"
    )


class ModelConfig(Part):
    name: str = Field(
        default="tiny", description="tiny, smollm2-135m, a folder with config.json, or a hub name org/name"
    )
    cache: str = Field(default="~/.cache/tidegate/models", description="Where converted models are kept, on every node")


class EnvironmentConfig(Part):
    name: str = Field(
        default="reverse",
        description="A built-in one (docs/environments.md), an installed entry point, or module:Class",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment")
    shuffle: bool = Field(default=True, description="A new seeded order in each epoch")
    epochs: Positive | None = Field(default=None, description="Passes over the tasks; null is endless")


class RolloutConfig(Part):
    siblings: Positive = Field(default=16, title="Rollouts per group (n)", description="Siblings of one prompt")
    batch: Positive = Field(default=32, title="Groups per step (B)", description="Prompts of one optimizer step")
    staleness: Count | None = Field(
        default=2, title="Staleness bound (S)", description="Versions; 0 on-policy, null unbounded"
    )
    submission: Literal["sample", "group"] = Field(
        default="sample", description="What executing counts: rollouts or groups"
    )
    order: Literal["fifo", "lifo"] = Field(
        default="fifo", description="Completion order, or newest first, within the bound"
    )
    executing: Positive | None = Field(
        default=1024,
        title="Executing (E)",
        description="Live rollouts (sample) or groups (group), of training and evaluation together."
        " E, P and R null is plain mode, in which nothing is owned and a run cannot train",
    )
    completed: Positive | None = Field(
        default=128, title="Completed (P)", description="Groups from first dispatch to settlement"
    )
    retained: Positive | None = Field(
        default=128, title="Retained (R)", description="Groups from reservation to settlement"
    )
    hot_bytes: Positive = Field(
        default=512 << 20, description="Payload bytes kept in memory; more is read from storage"
    )
    eviction_cap: Positive | None = Field(
        default=None, description="Completed groups beyond this start again; null: never"
    )
    prefetch: Count = Field(default=0, description="Groups whose payload moves to the trainer before their lease")
    filter: str = Field(
        default="none", description="Groups to discard and refill: none, zero_variance (DAPO), or module:function"
    )
    recovery: Literal["sibling", "prompt_group"] = Field(
        default="sibling", description="After a lost attempt: redo that rollout, or its whole group"
    )
    backoff: Count = Field(default=8, description="Groups that may wait for their next attempt at once")
    postprocessing: Positive = Field(default=64, description="Groups whose filter is at work at once")
    backoff_base: Seconds = Field(default=0.5, description="First pause before another attempt; doubles")
    backoff_max: Seconds = Field(default=60.0, description="Longest pause before another attempt")
    attempts: Positive = Field(default=5, description="Failed attempts of one rollout before its group is quarantined")
    losses: Positive = Field(default=20, description="Process deaths under one rollout before its group is quarantined")
    discard_rest: bool = Field(default=False, description="Discard a short last batch instead of training it")


class DrainConfig(Part):
    mode: Literal["boundary", "frontier", "none"] = Field(default="boundary", description="What an update waits for")
    deadline: Seconds = Field(default=120.0, description="How long")
    action: Literal["proceed", "cancel", "fail"] = Field(default="proceed", description="And what happens then")


class GenerationConfig(Part):
    engines: Positive = Field(default=1, description="Engine processes")
    slots: Positive = Field(default=256, description="Requests that one engine runs at once")
    max_length: Positive = Field(default=64, description="Tokens of prompt and answer together, per request")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: bfloat16 where it is fast"
    )
    cache_at_update: Literal["keep", "recompute"] = Field(
        default="keep", description="Cached keys and values at an update"
    )
    in_flight_updates: bool = Field(default=True, description="Weights may change in the middle of a generation")
    temperature: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Of sampling; 0 is greedy")
    device: str = Field(default="cpu", description="cpu, cuda")
    gpus: Annotated[float, Field(ge=0)] = Field(default=0.0, description="GPUs per engine, fractions allowed")
    cpus: Annotated[float, Field(ge=0)] = Field(default=0.5, description="CPUs per engine, as Ray counts them")
    threads: Positive = Field(
        default=1, description="Compute threads per engine; spinning threads on shared cores are slow"
    )
    workers: Positive = Field(default=1, description="Processes that run environments")
    concurrency: Positive = Field(default=1024, description="Rollouts per worker")


class TrainingConfig(Part):
    steps: Positive = Field(default=100, description="Optimizer steps of the whole run")
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=2e-3, description="AdamW's, after the warm-up")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="AdamW")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="AdamW")
    epsilon: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="AdamW")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="AdamW")
    warmup: Count = Field(default=10, description="Steps of linear warm-up")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Gradients are scaled to this norm")
    clip_low: Annotated[float, Field(gt=0)] = Field(default=0.2, description="Ratios are clipped to 1 - this")
    clip_high: Annotated[float, Field(gt=0)] = Field(default=0.28, description="... and to 1 + this (DAPO)")
    drop_zero_variance: bool = Field(default=True, description="Leave groups without signal out of the loss")
    micro_positions: Positive = Field(default=4096, description="Padded tokens of one forward pass")
    autocast: Literal["auto", "on", "off"] = Field(default="auto", description="Train in bfloat16 over float32 weights")
    device: str = Field(default="cpu", description="cpu, cuda")
    gpus: Annotated[float, Field(ge=0)] = Field(default=0.0, description="GPUs of the trainer, fractions allowed")
    cpus: Annotated[float, Field(ge=0)] = Field(default=0.5, description="CPUs of the trainer, as Ray counts them")
    threads: Positive = Field(default=1, description="Compute threads of the trainer")


class SuiteConfig(Part):
    name: Annotated[str, Field(min_length=1)] = Field(description="Of its results")
    environment: str = Field(description="As environment.name; its rewards are what is measured")
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment")
    tasks: Positive | None = Field(default=None, description="The first so many tasks; null: all")
    samples: Positive = Field(default=1, title="Samples (k)", description="Rollouts per task; pass@1 to pass@k")
    temperature: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Of sampling; 0 is greedy")
    threshold: float = Field(default=0.0, description="A sample succeeds when its reward is above this")


class EvaluationConfig(Part):
    """Suites that are measured beside training; they use at most half of rollout.executing."""

    every: Positive | None = Field(
        default=None, description="Steps between evaluations, and once more at the end of the run; null: never"
    )
    deadline: Annotated[float, Field(ge=0)] = Field(
        default=60.0,
        description="How long new weights wait for the evaluation of the old ones; later results are `mixed`",
    )
    end_deadline: Seconds = Field(
        default=1800.0,
        description="How long the end of the run waits for evaluations; samples that are not finished count as failed",
    )
    suites: tuple[SuiteConfig, ...] = Field(default=(), description="What is measured, each with a name of its own")


class CheckpointConfig(Part):
    every: Positive = Field(default=20, description="Steps between checkpoints")
    max_unsaved: Positive = Field(
        default=100, description="Training stops this many steps after the last good checkpoint"
    )
    strict_redo: bool = Field(default=False, description="Stop when a redone step comes to another state")
    redo: Literal["replay", "requeue"] = Field(
        default="replay",
        description="Committed steps after the restored checkpoint: train the journaled groups again, or take the steps"
        " back and generate their groups anew, with every other group that has work",
    )
    deadline: Seconds | None = Field(
        default=None,
        description="An attempt of a flow run has this long from its start (a slot of a scheduler or a spot machine):"
        " before it is over, the state is published and the attempt ends as DeadlineReached; null: no limit",
    )
    reserve: Seconds = Field(
        default=10.0,
        description="Kept free for the publication before a deadline, at least; more when the last ones took longer",
    )
    grace: Seconds = Field(
        default=30.0, description="From SIGTERM, or from a notice that does not say how long, to the end"
    )
    notice: str | None = Field(
        default=None,
        description="A file whose appearing says that the machine will go; it may hold the seconds that are left",
    )


class RetentionConfig(Part):
    """What a run keeps. Ledger snapshots and the journal are no part of it."""

    last: Annotated[int, Field(ge=2)] = Field(
        default=3, description="Newest checkpoints kept: one to begin with, the others for when it is damaged"
    )
    every: Count = Field(
        default=0, description="Also keep each checkpoint of a step that this divides, to fork from; 0: none"
    )
    payload: Literal["keep", "needed"] = Field(
        default="keep",
        description="Token files of settled groups: keep, so that verify proves all tokens for ever, or only what a"
        " restore needs",
    )
    pin_hours: Annotated[float, Field(gt=0)] = Field(
        default=24.0, description="A reader's pin on a checkpoint is ignored after so long"
    )


class ClusterConfig(Part):
    address: str = Field(
        default="auto", description="Ray address host:port; auto: RAY_ADDRESS, else a cluster of this process"
    )
    namespace: str = Field(default="tidegate", description="Ray namespace of the run's actors")
    start_deadline: Seconds = Field(
        default=120.0, description="A process that is not placed and ready by then is an error"
    )
    activate_deadline: Seconds = Field(
        default=300.0, description="An update that no engine confirms by then is an error"
    )
    restart_pause: Seconds = Field(default=0.5, description="Before a dead engine or worker is started again; doubles")
    max_failures: Positive = Field(default=5, description="Starts in a row that may fail before the flow run fails")
    lease_deadline: Seconds = Field(default=1800.0, description="How long a step may wait for its batch")
    hold_ttl: Seconds = Field(default=120.0, description="A hold that is not renewed for so long ends")
    alive_deadline: Seconds = Field(
        default=30.0, description="A manager or trainer that does not answer for so long is dead"
    )
    driver_silence: Seconds = Field(
        default=60.0, description="A driver silent for so long may be replaced by another flow run"
    )


class FlowConfig(Part):
    steps_per_task: Positive = Field(
        default=1, description="Above 1, so many steps share one task: for steps below a second"
    )
