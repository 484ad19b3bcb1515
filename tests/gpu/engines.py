"""The contract every engine keeps; a new engine subclasses `EngineContract` and says how to make one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.generation.engine import Cached, Engine, Finish, Generated, GenRequest, Partial, Sampling, Version
from gpu.generation.weights import weight_buffers
from gpu.models.config import LlamaConfig
from gpu.models.llama import LlamaModel
from storage.buffers import NamedBuffer, buffers_digest
from storage.errors import ArtifactCorrupt, ConfigurationRefused, LineageInvalid
from storage.payload import VersionSpan

CONFIG = LlamaConfig(50, 32, 48, 2, 4, 2, 10_000.0, 1e-5, True, 128)


def weights_of(seed: int) -> dict[str, NamedBuffer]:
    model = LlamaModel(CONFIG)
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return weight_buffers(model)


def version(number: int, incarnation: int = 1) -> Version:
    return Version(incarnation, number, buffers_digest(weights_of(number)))


def request(name: str, prompt: list[int], tokens: int = 12, seed: int = 7, temperature: float = 1.0,
            stop: frozenset[int] = frozenset(), partial: Partial | None = None) -> GenRequest:  # fmt: skip
    return GenRequest(name, tuple(prompt), Sampling(tokens, temperature, seed, stop), partial or Partial())


def run(engine: Engine, *requests: GenRequest, limit: int = 500) -> dict[str, Generated]:
    for one in requests:
        engine.add(one)
    ended: dict[str, Generated] = {}
    for _ in range(limit):
        for result in engine.step():
            assert result.id not in ended, "exactly one finish"
            ended[result.id] = result
        if len(ended) == len(requests):
            return ended
    raise AssertionError("requests did not finish")


class EngineContract:
    def make(self, slots: int = 4) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def engine(self) -> Engine:
        engine = self.make()
        engine.update(version(1), weights_of(1), Cached.KEEP)
        return engine

    def test_every_request_ends_once_with_a_logprob_and_a_version_per_token(self, engine: Engine) -> None:
        requests = [request(f"r{i}", [i + 1] * (i % 5 + 1), tokens=i % 7 + 1, seed=i) for i in range(11)]
        ended = run(engine, *requests)
        for one in requests:
            result = ended[one.id]
            assert len(result.tokens) == len(result.logprobs) == one.sampling.max_tokens
            assert result.spans == (VersionSpan(1, 1, len(result.tokens)),)
            assert result.finish is Finish.LENGTH
            assert np.isfinite(result.logprobs).all()
        assert engine.stats().running == engine.stats().waiting == 0

    def test_a_stop_token_ends_a_request_and_is_its_last_token(self, engine: Engine) -> None:
        free = run(engine, request("a", [3], tokens=30))["a"].tokens.tolist()
        stop = free[5]
        found = run(engine, request("a", [3], tokens=30, stop=frozenset({stop})))["a"]
        assert found.finish is Finish.STOP
        assert found.tokens.tolist() == free[: free.index(stop) + 1]

    def test_tokens_do_not_depend_on_batch_mates(self, engine: Engine) -> None:
        alone = run(engine, request("a", [3, 4], seed=11))["a"]
        crowd = run(engine, *[request(f"x{i}", [5] * (i + 1), seed=i) for i in range(6)], request("a", [3, 4], seed=11))
        assert crowd["a"].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(crowd["a"].logprobs, alone.logprobs, atol=1e-4)

    def test_equal_prompts_with_different_seeds_differ(self, engine: Engine) -> None:
        ended = run(engine, *[request(f"s{i}", [3, 4], seed=i) for i in range(4)])
        assert len({tuple(result.tokens) for result in ended.values()}) == 4

    def test_logprobs_are_those_of_the_full_forward(self, engine: Engine) -> None:
        found = run(engine, request("a", [3, 4, 5]))["a"]
        scored = engine.score([[3, 4, 5, *found.tokens.tolist()]])[0]
        np.testing.assert_allclose(found.logprobs, scored[2:], atol=1e-4)

    def test_logprobs_are_taken_under_the_sampled_distribution(self, engine: Engine) -> None:
        cold = run(engine, request("a", [3, 4, 5], tokens=1, temperature=0.5))["a"]
        model = LlamaModel(CONFIG)
        from gpu.generation.weights import install

        install(model, weights_of(1))
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([[3, 4, 5]]))[0, -1])
        expected = torch.log_softmax(logits / 0.5, -1)[int(cold.tokens[0])]
        np.testing.assert_allclose(cold.logprobs[0], expected.item(), atol=1e-4)

    def test_sampling_follows_the_distribution(self, engine: Engine) -> None:
        ended = run(engine, *[request(f"s{i}", [3], tokens=1, seed=i) for i in range(2000)], limit=3000)
        counts = np.bincount([int(result.tokens[0]) for result in ended.values()], minlength=50) / 2000
        model = LlamaModel(CONFIG)
        from gpu.generation.weights import install

        install(model, weights_of(1))
        with torch.no_grad():
            expected = model.logits(model(torch.tensor([[3]]))[0, -1]).softmax(-1).numpy()
        assert np.abs(counts - expected).max() < 5 * np.sqrt(0.25 / 2000)

    def test_greedy_takes_the_likeliest_token(self, engine: Engine) -> None:
        found = run(engine, request("a", [3, 4], temperature=0.0, seed=1))["a"]
        other = run(engine, request("a", [3, 4], temperature=0.0, seed=2))["a"]
        assert found.tokens.tolist() == other.tokens.tolist()

    def test_abort_ends_running_and_waiting_requests_with_what_they_have(self, engine: Engine) -> None:
        for i in range(6):
            engine.add(request(f"r{i}", [3], tokens=50, seed=i))
        for _ in range(5):
            assert engine.step() == []
        some = engine.abort({"r1", "r5"})
        assert {result.id: len(result.tokens) for result in some} == {"r1": 5, "r5": 0}
        rest = engine.abort(None)
        assert {result.id for result in [*some, *rest]} == {f"r{i}" for i in range(6)}
        assert all(result.finish is Finish.ABORT for result in rest)
        assert engine.stats().free_slots == 4
        assert engine.step() == []

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_an_aborted_request_goes_on_elsewhere_as_if_nothing_had_happened(
        self, engine: Engine, temperature: float
    ) -> None:
        whole = run(engine, request("a", [3, 4], tokens=20, temperature=temperature))["a"]
        engine.add(request("a", [3, 4], tokens=20, temperature=temperature))
        for _ in range(8):
            engine.step()
        cut = engine.abort({"a"})[0]
        other = self.make(slots=2)
        other.update(version(1), weights_of(1), Cached.KEEP)
        partial = Partial(tuple(cut.tokens.tolist()), tuple(cut.logprobs.tolist()), cut.spans)
        resumed = run(other, request("a", [3, 4], tokens=20, temperature=temperature, partial=partial))["a"]
        assert resumed.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(resumed.logprobs, whole.logprobs, atol=1e-4)
        assert resumed.spans == whole.spans

    @pytest.mark.parametrize("cached", list(Cached))
    def test_a_weight_update_in_the_middle_loses_nothing_and_tags_each_token(
        self, engine: Engine, cached: Cached
    ) -> None:
        for i in range(6):
            engine.add(request(f"r{i}", [3, i + 1], tokens=10, seed=i))
        ended = [result for _ in range(4) for result in engine.step()]
        engine.update(version(2), weights_of(2), cached)
        while len(ended) < 6:
            ended += engine.step()
        spans = {result.id: result.spans for result in ended}
        assert spans["r0"] == (VersionSpan(1, 1, 4), VersionSpan(1, 2, 10))
        assert spans["r5"] == (VersionSpan(1, 2, 10),), "it waited for a slot until after the update"
        if cached is Cached.RECOMPUTE:
            result = next(result for result in ended if result.id == "r2")
            scored = engine.score([[3, 3, *result.tokens.tolist()]])[0][1:]
            np.testing.assert_allclose(result.logprobs[4:], scored[4:], atol=1e-4)

    def test_keeping_old_keys_is_not_what_recomputing_gives(self) -> None:
        logprobs = []
        for cached in Cached:
            engine = self.make()
            engine.update(version(1), weights_of(1), Cached.KEEP)
            engine.add(request("a", [3, 4], tokens=10))
            for _ in range(4):
                engine.step()
            engine.update(version(2), weights_of(2), cached)
            ended: list[Generated] = []
            while not ended:
                ended = engine.step()
            logprobs.append(ended[0].logprobs[:5])
        assert np.abs(logprobs[0] - logprobs[1]).max() > 1e-3

    @pytest.mark.parametrize("damage", ["digest", "missing", "shape", "dtype"])
    def test_a_bad_update_is_refused_whole_and_the_old_version_answers(self, engine: Engine, damage: str) -> None:
        before = run(engine, request("a", [3, 4]))["a"].tokens.tolist()
        weights, wanted = weights_of(2), version(2)
        name = next(iter(weights))
        old = weights[name]
        if damage == "digest":
            wanted = Version(1, 2, version(3).digest)
        elif damage == "missing":
            del weights[name]
        elif damage == "shape":
            weights[name] = NamedBuffer(old.dtype, (old.shape[1], old.shape[0]), old.data)
        else:
            weights[name] = NamedBuffer("F64", (old.shape[0], old.shape[1] // 2), old.data)
        with pytest.raises(ArtifactCorrupt):
            engine.update(wanted, weights, Cached.KEEP)
        assert engine.stats().version == version(1)
        assert engine.checksum() == version(1).digest
        assert run(engine, request("a", [3, 4]))["a"].tokens.tolist() == before

    def test_versions_never_go_back_and_the_same_twice_is_a_no_op(self, engine: Engine) -> None:
        engine.update(version(3), weights_of(3), Cached.KEEP)
        updates = engine.stats().updates
        engine.update(version(3), weights_of(3), Cached.KEEP)
        assert engine.stats().updates == updates
        with pytest.raises(LineageInvalid):
            engine.update(version(2), weights_of(2), Cached.KEEP)
        engine.update(version(2, incarnation=2), weights_of(2), Cached.KEEP)
        assert engine.checksum() == version(2).digest

    def test_a_request_that_cannot_fit_is_refused_by_its_numbers(self, engine: Engine) -> None:
        with pytest.raises(ConfigurationRefused, match="60 prompt tokens \\+ 10 new ones"):
            engine.add(request("a", [1] * 60, tokens=10))
        for bad in (request("a", []), request("a", [1], tokens=0)):
            with pytest.raises(ConfigurationRefused):
                engine.add(bad)

    def test_before_the_first_version_requests_wait(self) -> None:
        engine = self.make()
        engine.add(request("a", [3]))
        assert engine.step() == []
        engine.update(version(1), weights_of(1), Cached.KEEP)
        assert set(run_on(engine)) == {"a"}


def run_on(engine: Engine) -> list[str]:
    ended: list[str] = []
    while not ended:
        ended = [result.id for result in engine.step()]
    return ended
