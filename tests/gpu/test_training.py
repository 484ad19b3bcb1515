"""Losses against their formulas, packed groups against separate sequences, and the trainer's compare-and-set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.generation.weights import to_buffer, weight_buffers
from gpu.models.config import TINY, ModelSpec
from gpu.models.llama import LlamaModel
from gpu.training.advantage import group_normalized, has_signal
from gpu.training.loss import Clip, clip_fraction, clipped_token_loss
from gpu.training.packing import collate, micro_batches, pack_group, pack_samples, shared_prefix
from gpu.training.settings import OptimizerSettings, TrainingSettings
from gpu.training.trainer import Trainer
from storage.buffers import NamedBuffer, buffers_digest
from storage.capture import CaptureBuffers
from storage.errors import ArtifactCorrupt, LeaseRefused, TrainingDiverged
from storage.payload import VersionSpan
from storage.samples import Sample

CPU = torch.device("cpu")
CLIP = Clip(0.2, 0.28)
OPTIMIZER = OptimizerSettings(1e-2, 0.9, 0.95, 1e-8, 0.0, 2, 1.0)


def settings(**changes: object) -> TrainingSettings:
    values: dict[str, object] = {
        "optimizer": OPTIMIZER, "clip_low": 0.2, "clip_high": 0.28, "drop_zero_variance": True, "micro_positions": 64,
        "autocast": False, "engine_dtype": "F32",
    }  # fmt: skip
    return TrainingSettings(**{**values, **changes})  # type: ignore[arg-type]


def sample(group: int, sibling: int, prompt: list[int], answer: list[int], reward: float, index: int = 0) -> Sample:
    dice = np.random.default_rng([group, sibling, index])
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.int8)
    logprobs = np.where(mask == 1, -dice.random(len(mask)) * 4, 0.0).astype(np.float32)
    return Sample(group, sibling, 0, index, np.array(prompt + answer, np.int32), logprobs, mask,
                  (VersionSpan(1, 0, len(answer)),), reward)  # fmt: skip


def groups_of(seed: int, num: int = 3, n: int = 4) -> list[list[list[Sample]]]:
    """Groups of `n` slots with a sample each."""
    dice = np.random.default_rng(seed)
    made = []
    for g in range(num):
        prompt = dice.integers(1, 60, dice.integers(1, 6)).tolist()
        answers = [
            (dice.integers(1, 60, dice.integers(1, 7)).tolist(), float(dice.integers(2)) + s * 0.1) for s in range(n)
        ]
        made.append([[sample(g, s, prompt, answer, reward)] for s, (answer, reward) in enumerate(answers)])
    return made


def trainer(**changes: object) -> Trainer:
    return Trainer(ModelSpec("tiny", 5, ""), settings(**changes), CPU)


def many_samples() -> list[list[list[Sample]]]:
    """Two groups with slots of one to three samples; the later ones share two tokens of their prompts, or nothing."""
    return [
        [
            [sample(0, 0, [1, 2, 3], [4, 5], 1.0), sample(0, 0, [1, 2, 9], [6], 1.0, 1)],
            [sample(0, 1, [1, 2, 3], [7], 0.0)],
            [
                sample(0, 2, [1, 2, 3], [8, 9, 10], 0.5),
                sample(0, 2, [1, 2, 11, 12], [13, 14], 0.5, 1),
                sample(0, 2, [20], [21], 0.5, 2),
            ],
        ],
        [
            [sample(1, 0, [5, 6], [7], 0.0)],
            [sample(1, 1, [5, 6], [8], 1.0)],
            [sample(1, 2, [5, 6], [9], 0.0), sample(1, 2, [30, 31], [32, 33], 0.0, 1)],
        ],
    ]


def assert_packed_like_separate(groups: list[list[list[Sample]]]) -> None:
    """Loss and every gradient of the packed groups against one sequence at a time, by the formula."""
    packed_model, plain_model = LlamaModel(TINY), LlamaModel(TINY)
    packed_model.init_weights(1)
    plain_model.load_state_dict(packed_model.state_dict())
    loss = packed_loss(packed_model, groups)
    total = sum((separate_loss(plain_model, group) for group in groups), torch.zeros(()))
    loss.backward()
    total.backward()
    torch.testing.assert_close(loss, total, atol=1e-4, rtol=1e-4)
    for (name, a), b in zip(packed_model.named_parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3, msg=name)


def packed_loss(model: LlamaModel, groups: list[list[list[Sample]]]) -> torch.Tensor:
    packs = [pack for g in groups for pack in pack_group(g, group_normalized([slot[0].reward for slot in g]))]
    batch = collate(packs, CPU)
    hidden = model(batch.tokens_BT, batch.positions_BT, batch.mask_BTT)
    logprobs = torch.log_softmax(model.logits(hidden[batch.rows_P, batch.predictors_P]), -1)
    logprobs = logprobs.gather(-1, batch.targets_P[:, None])[:, 0]
    return clipped_token_loss(logprobs, batch.behaviour_P, batch.advantages_P, CLIP)


def separate_loss(model: LlamaModel, group: list[list[Sample]]) -> torch.Tensor:
    """Advantages from one reward per slot; every sample of a slot has the slot's."""
    rewards = np.array([slot[0].reward for slot in group])
    total = torch.zeros(())
    for slot, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
        for one in slot:
            ids = torch.tensor(one.tokens[None], dtype=torch.long)
            full = torch.log_softmax(model.logits(model(ids)[0, :-1]), -1).gather(-1, ids[0, 1:, None])[:, 0]
            where = torch.from_numpy(one.mask[1:] == 1)
            weights = torch.full((int(where.sum()),), float(advantage))
            total = total + clipped_token_loss(full[where], torch.from_numpy(one.logprobs[1:])[where], weights, CLIP)
    return total


class TestFormulas:
    def test_advantages_are_normalised_within_the_group(self) -> None:
        found = group_normalized([0.0, 1.0, 1.0, 0.0])
        np.testing.assert_allclose(found, np.array([-0.5, 0.5, 0.5, -0.5]) / (0.5 + 1e-4))
        np.testing.assert_array_equal(group_normalized([0.3, 0.3]), [0.0, 0.0])
        assert has_signal([0.0, 1.0])
        assert not has_signal([1.0, 1.0])

    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss", "gradient"),
        [
            (1.0, 2.0, -2.0, -2.0),
            (1.5, 1.0, -1.28, 0.0),
            (1.5, -1.0, 1.5, 1.5),
            (0.5, -1.0, 0.8, 0.0),
            (0.5, 1.0, -0.5, -0.5),
        ],
    )
    def test_the_clipped_loss_by_hand(self, ratio: float, advantage: float, loss: float, gradient: float) -> None:
        """-min(r A, clip(r, 0.8, 1.28) A); its gradient in the logprob is -r A where the clip does not bind."""
        behaviour = torch.tensor([-1.0], dtype=torch.float64)
        logprob = (behaviour + np.log(ratio)).requires_grad_()
        weight = torch.tensor([advantage], dtype=torch.float64)
        found = clipped_token_loss(logprob, behaviour, weight, Clip(0.2, 0.28))
        found.backward()
        assert found.item() == pytest.approx(loss)
        assert logprob.grad.item() == pytest.approx(gradient)
        assert clip_fraction(logprob, behaviour, weight, Clip(0.2, 0.28)).item() == (gradient == 0.0)


class TestPacking:
    def test_the_shared_prefix_ends_before_any_generated_token(self) -> None:
        a, b = sample(0, 0, [1, 2, 3], [4, 5], 1.0), sample(0, 1, [1, 2, 3], [4, 6], 0.0)
        assert shared_prefix([a, b]) == 3
        assert shared_prefix([a, sample(0, 1, [1, 9, 3], [4], 0.0)]) == 1
        assert shared_prefix([a, sample(0, 1, [1, 2], [3, 4], 0.0)]) == 2

    def test_packed_groups_have_the_loss_and_gradient_of_separate_sequences(self) -> None:
        groups = groups_of(1, num=4)
        groups[0][0] = [sample(0, 0, [7, 8, 9], [3, 4], 0.7)]  # a sibling that shares no prompt
        assert_packed_like_separate(groups)

    def test_a_slot_of_several_samples_has_the_gradient_of_their_sum_with_the_slots_advantage(self) -> None:
        groups = many_samples()
        assert [[len(slot) for slot in group] for group in groups] == [[2, 1, 3], [1, 1, 2]]
        assert_packed_like_separate(groups)

    def test_samples_with_the_same_index_share_a_pack_and_what_their_prompts_have_in_common(self) -> None:
        first, second, third = pack_group(many_samples()[0], np.array([1.0, -1.0, 0.5]))
        assert (first.segments == 0).sum() == 3
        assert set(first.segments.tolist()) == {0, 1, 2, 3}
        assert (second.segments == 0).sum() == 2
        assert set(second.segments.tolist()) == {0, 1, 2}
        assert set(second.advantages.tolist()) == {1.0, 0.5}, "of the slots that have a second sample"
        assert set(third.advantages.tolist()) == {0.5}

    def test_several_turns_are_packed_with_the_environments_tokens_masked(self) -> None:
        tokens = np.array([1, 2, 3, 4, 5], np.int32)
        mask = np.array([0, 1, 0, 0, 1], np.int8)
        one = Sample(0, 0, 0, 0, tokens, np.array([0, -1, 0, 0, -2], np.float32), mask, (VersionSpan(1, 0, 2),), 1.0)
        packed = pack_samples([one, one], np.array([1.0, -1.0]))
        assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 2, 3, 4, 5]
        assert packed.predictors.tolist() == [0, 3, 0, 7]
        assert packed.targets.tolist() == [2, 5, 2, 5]
        assert packed.advantages.tolist() == [1, 1, -1, -1]
        assert packed.positions.tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4]

    def test_micro_batches_keep_order_and_the_bound(self) -> None:
        packed = [pack for g in groups_of(3, num=9) for pack in pack_group(g, np.zeros(len(g)))]
        batches = micro_batches(packed, 60)
        assert [id(g) for batch in batches for g in batch] == [id(g) for g in packed]
        assert all(len(b) == 1 or max(map(len, b)) * len(b) <= 60 for b in batches)
        assert len(micro_batches(packed, 1)) == 9


class TestTrainer:
    def test_a_step_is_a_compare_and_set_on_the_state(self) -> None:
        one = trainer()
        start = one.state_digest
        done = one.train(1, 1, "", groups_of(1), 0)
        assert done.state_digest == one.state_digest != start
        for step, lease, expected in ((1, 2, ""), (3, 2, ""), (2, 2, start)):
            with pytest.raises(LeaseRefused):
                one.train(step, lease, expected, groups_of(2), 1)
        assert one.state_digest == done.state_digest
        again = one.train(1, 1, "", groups_of(9), 0)
        assert again == done, "a repeat of the last step is answered, not trained"
        one.train(2, 2, done.state_digest, groups_of(2), 1)

    def test_the_same_steps_give_the_same_state_whatever_the_micro_batch(self) -> None:
        digests = set()
        for _ in range(2):
            one = trainer()
            for step in range(1, 4):
                one.train(step, step, "", groups_of(step), step - 1)
            digests.add(one.state_digest)
        assert len(digests) == 1
        one, other = trainer(micro_positions=1), trainer(micro_positions=10_000)
        one.train(1, 1, "", groups_of(1), 0)
        other.train(1, 1, "", groups_of(1), 0)
        for a, b in zip(one._model.parameters(), other._model.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)

    def test_a_restored_trainer_goes_on_to_the_same_state(self) -> None:
        one = trainer()
        one.train(1, 1, "", groups_of(1), 0)
        saved = one.capture(CaptureBuffers())
        one.train(2, 2, "", groups_of(2), 1)
        other = trainer()
        other.load(1, saved.buffers(), saved.meta, saved.state_digest)
        assert (other.step, other.state_digest) == (1, saved.state_digest)
        other.train(2, 7, saved.state_digest, groups_of(2), 1)
        assert other.state_digest == one.state_digest
        assert buffers_digest(saved.buffers(), saved.meta) == saved.state_digest, "later steps do not touch a capture"

    @pytest.mark.parametrize("damage", ["bit", "missing", "meta"])
    def test_another_state_than_the_named_one_is_refused_and_nothing_changes(self, damage: str) -> None:
        one = trainer()
        one.train(1, 1, "", groups_of(1), 0)
        saved = one.capture(CaptureBuffers())
        buffers, meta = dict(saved.buffers()), saved.meta
        name = next(iter(buffers))
        if damage == "bit":
            data = buffers[name].data.copy()
            data[0] ^= 1
            buffers[name] = NamedBuffer(buffers[name].dtype, buffers[name].shape, data)
        elif damage == "missing":
            del buffers[name]
        else:
            meta = '{"updates": 2}'
        other = trainer()
        before = other.state_digest
        with pytest.raises(ArtifactCorrupt):
            other.load(1, buffers, meta, saved.state_digest)
        assert (other.state_digest, other.step, other.clean) == (before, 0, True)

    def test_groups_without_signal_are_left_out_and_a_batch_of_them_changes_no_weight(self) -> None:
        flat = [[[sample(0, s, [1, 2], [3], 1.0)] for s in range(3)]]
        one = trainer()
        start = one.weights_digest
        done = one.train(1, 1, "", flat, 0)
        assert (done.metrics["trained_groups"], one.weights_digest) == (0.0, start)
        mixed, alone = trainer(), trainer()
        mixed.train(1, 1, "", [*groups_of(1), *flat], 0)
        alone.train(1, 1, "", groups_of(1), 0)
        assert mixed.state_digest == alone.state_digest

    def test_a_gradient_that_is_not_finite_changes_nothing_and_the_lease_can_be_rolled_back(self) -> None:
        bad = groups_of(1)
        bad[0][0][0].logprobs[-1] = np.nan
        one = trainer()
        start = one.state_digest
        with pytest.raises(TrainingDiverged):
            one.train(1, 1, "", bad, 0)
        assert (one.state_digest, one.clean, one.step) == (start, True, 0)
        fresh = trainer()
        fresh.train(1, 2, "", groups_of(2), 0)
        one.train(1, 2, "", groups_of(2), 0)
        assert one.state_digest == fresh.state_digest, "no gradient of the refused step is left"

    def test_a_failure_after_the_first_change_leaves_the_state_unusable_and_says_so(self, monkeypatch) -> None:
        one = trainer()

        def fails() -> None:
            raise MemoryError

        monkeypatch.setattr(one, "_take_digests", fails)
        with pytest.raises(MemoryError):
            one.train(1, 1, "", groups_of(1), 0)
        monkeypatch.undo()
        assert not one.clean
        with pytest.raises(LeaseRefused, match="half changed"):
            one.train(1, 1, "", groups_of(1), 0)

    def test_metrics_say_what_was_trained(self) -> None:
        done = trainer().train(1, 1, "", groups_of(1), 4)
        assert done.metrics["samples"] == 12
        assert (done.metrics["staleness_mean"], done.metrics["staleness_max"]) == (4, 4)
        rewards = [slot[0].reward for g in groups_of(1) for slot in g]
        assert done.metrics["reward_mean"] == pytest.approx(np.mean(rewards))
        assert done.metrics["logprob_gap"] > 0

    def test_a_slot_with_many_samples_weighs_no_more_in_rewards_baseline_and_signal(self) -> None:
        done = trainer().train(1, 1, "", many_samples(), 0)
        assert (done.metrics["samples"], done.metrics["groups"], done.metrics["trained_groups"]) == (10, 2, 2)
        assert done.metrics["reward_mean"] == pytest.approx((1.0 + 0.0 + 0.5 + 0.0 + 1.0 + 0.0) / 6)
        assert done.metrics["trained_tokens"] == 15
        assert done.metrics["tokens_mean"] == pytest.approx(15 / 6), "per rollout"
        twice = [[[sample(0, s, [1, 2], [3], 1.0), sample(0, s, [4], [5], 1.0, 1)] for s in range(2)]]
        assert trainer().train(1, 1, "", twice, 0).metrics["trained_groups"] == 0, "equal rewards carry no signal"

    def test_a_step_does_not_depend_on_how_samples_fall_into_micro_batches(self) -> None:
        one, other = trainer(micro_positions=1), trainer(micro_positions=10_000)
        one.train(1, 1, "", many_samples(), 0)
        other.train(1, 1, "", many_samples(), 0)
        for a, b in zip(one._model.parameters(), other._model.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)

    def test_engines_receive_the_weights_in_their_own_dtype(self) -> None:
        one = trainer(engine_dtype="BF16")
        weights = one.weights()
        assert {b.dtype for b in weights.values()} == {"BF16"}
        assert buffers_digest(weights) == one.weights_digest
        for (_, buffer), parameter in zip(weights.items(), one._model.parameters(), strict=True):
            assert (buffer.data == to_buffer(parameter.detach().bfloat16()).data).all()
        assert trainer().weights().keys() == weight_buffers(one._model).keys()

    def test_training_makes_rewarded_answers_likelier(self) -> None:
        one = trainer()
        good, bad = [10, 11], [20, 21]
        batch = [[[sample(0, 0, [5, 6], good, 1.0)], [sample(0, 1, [5, 6], bad, 0.0)]]]

        def likelihood(answer: list[int]) -> float:
            ids = torch.tensor([[5, 6, *answer]])
            with torch.no_grad():
                logprobs = torch.log_softmax(one._model.logits(one._model(ids)[0]), -1)
            return float(logprobs[1, answer[0]] + logprobs[2, answer[1]])

        before = likelihood(good), likelihood(bad)
        for step in range(1, 6):
            for (one_sample,) in batch[0]:
                answer = one_sample.tokens[2:].tolist()
                ids = torch.tensor([[5, 6, *answer]])
                with torch.no_grad():
                    lp = torch.log_softmax(one._model.logits(one._model(ids)[0]), -1)
                one_sample.logprobs[2:] = [float(lp[1, answer[0]]), float(lp[2, answer[1]])]
            one.train(step, step, "", batch, step - 1)
        assert likelihood(good) > before[0]
        assert likelihood(bad) < before[1]
