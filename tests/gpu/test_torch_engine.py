"""The embedded engine keeps the engine contract."""

from __future__ import annotations

import torch

from gpu.generation.engine import Cached, Engine
from gpu.generation.torch_engine import TorchEngine
from tests.gpu.engines import CONFIG, EngineContract, request, run, version, weights_of


class TestTorchEngine(EngineContract):
    def make(self, slots: int = 4) -> Engine:
        return TorchEngine(CONFIG, slots=slots, max_length=64, dtype=torch.float32, device=torch.device("cpu"))


def test_identical_contexts_are_computed_once(monkeypatch) -> None:
    import gpu.generation.torch_engine as module

    engine = TestTorchEngine().make(slots=8)
    engine.update(version(1), weights_of(1), Cached.KEEP)
    rows: list[int] = []
    forward = module.cached_forward

    def counting(model, cache, tokens, *rest):
        rows.append(tokens.shape[0])
        return forward(model, cache, tokens, *rest)

    monkeypatch.setattr(module, "cached_forward", counting)
    shared = run(engine, *[request(f"a{i}", [3, 4, 5], seed=i) for i in range(6)], request("b", [6, 7], seed=9))
    assert rows[0] == 2
    monkeypatch.undo()
    for i in range(6):
        alone = run(engine, request(f"a{i}", [3, 4, 5], seed=i))
        assert alone[f"a{i}"].tokens.tolist() == shared[f"a{i}"].tokens.tolist()
