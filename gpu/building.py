"""From a run's specification to the parts that live in its processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpu.environments.agent import Agent, Generate, RolloutSink
from gpu.generation.client import EngineCalls
from gpu.generation.suites import MakeAgent
from gpu.generation.worker import ManagerCalls, RolloutWorker
from gpu.models.config import find, load_config, load_tokenizer
from gpu.rollout.source import suite_seed
from gpu.spec import ProcessSpec, RunSpec
from storage.errors import ResourceUnavailable
from storage.filesystem import Store

if TYPE_CHECKING:
    import torch

    from gpu.generation.server import EngineServer
    from gpu.models.tokenizer import Tokenizer
    from gpu.training.trainer import Trainer


def use_process(process: ProcessSpec) -> torch.device:
    """Set up this process for its share of the machine; its device. Raises `ResourceUnavailable`."""
    import torch

    torch.set_num_threads(process.threads)
    device = torch.device(process.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ResourceUnavailable(
            f"device {process.device!r} and no CUDA device in this process",
            expected="a visible CUDA device",
            action="set the device to cpu, or ask for gpus so that Ray assigns one",
        )
    return device


def seed_process(seed: int) -> None:
    """Nothing in a run draws from global generators; user code may."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def build_engine(spec: RunSpec) -> EngineServer:
    """An engine without weights; they come with the first version."""
    from gpu.generation.server import EngineServer
    from gpu.generation.torch_engine import TorchEngine
    from gpu.generation.weights import DTYPES

    device = use_process(spec.engine.process)
    dtype = next(dtype for dtype, name in DTYPES.items() if name == spec.engine.dtype)
    engine = TorchEngine(
        load_config(find(spec.model)),
        slots=spec.engine.slots,
        max_length=spec.engine.max_length,
        dtype=dtype,
        device=device,
        in_flight_swap=spec.engine.in_flight_swap,
    )
    return EngineServer(engine, spec.engine.cached)


def build_trainer(spec: RunSpec) -> Trainer:
    from gpu.training.trainer import Trainer

    device = use_process(spec.trainer)
    return Trainer(spec.model, spec.training, device)


def build_worker(
    spec: RunSpec,
    name: str,
    incarnation: int,
    manager: ManagerCalls,
    engines: Callable[[str], EngineCalls],
    store: Store,
) -> RolloutWorker:
    seed_process(spec.source.seed)
    environment = spec.source.environment_of()
    stream, tokenizer = spec.source.stream(environment), load_tokenizer(spec.model)
    return RolloutWorker(
        name,
        incarnation,
        manager,
        engines,
        environment,
        tokenizer,
        store,
        spec.run,
        seed=spec.source.seed,
        temperature=spec.engine.temperature,
        position=lambda ordinal: stream.position(ordinal).row,
        concurrency=spec.worker.concurrency,
        suites=lambda generate: _suite_agents(spec, tokenizer, generate),
    )


def _suite_agents(spec: RunSpec, tokenizer: Tokenizer, generate: Generate) -> MakeAgent:
    suites = {suite.name: suite for suite in spec.evaluation.suites}

    def make(name: str, sink: RolloutSink) -> Agent:
        suite = suites[name]
        return Agent(
            suite.environment_of(),
            tokenizer,
            generate,
            sink,
            seed=suite_seed(spec.source.seed, name),
            temperature=suite.temperature,
            position=lambda index: index,
        )

    return make
