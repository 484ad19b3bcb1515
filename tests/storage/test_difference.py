"""Two checkpoints are compared by their objects' names first, and by their numbers where those differ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from storage.difference import Difference, Published, TensorDifference, compare
from storage.errors import ArtifactCorrupt, UnknownCheckpoint, UnknownRun
from storage.memory import MemoryStore
from storage.numbers import Numbers, Tally
from storage.runs import RunPaths
from storage.schema import Retired
from tests.storage.published_runs import Publisher, floats, tensor

W = np.arange(1000, dtype=np.float32)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def difference(store: MemoryStore, left: int | None, right: int | None) -> Difference:
    published = Published(store, "r")
    return compare(published.at(left), published.at(right))


def numbers_of(dtype: str, left: np.ndarray, right: np.ndarray) -> Numbers:
    tally = Tally(dtype)
    tally.add(tensor(dtype, left).data, tensor(dtype, right).data)
    return tally.numbers(left.size)


# ---------------------------------------------------------------------- tensors


def test_a_checkpoint_equals_itself_and_nothing_is_read(store: MemoryStore) -> None:
    Publisher(store).publish(1, {"a": floats(1, 2), "b": floats(3)}, updates=1)
    found = difference(store, 1, None)
    assert found.equal
    assert (found.num_equal, found.bytes_read, found.bytes_left, found.bytes_right) == (2, 0, 0, 0)
    assert found.bytes_shared > 0


def test_what_is_new_gone_of_another_form_and_changed_is_told_apart(store: MemoryStore) -> None:
    run = Publisher(store)
    run.publish(1, {"gone": floats(1), "shape": floats(1, 2), "dtype": floats(1), "same": floats(7), "w": floats(1, 4)})
    run.publish(2, {"new": floats(1), "shape": floats(1, 2, 3), "dtype": tensor("I32", np.array([1], np.int32)),
                    "same": floats(7), "w": floats(1, 6)})  # fmt: skip
    found = difference(store, 1, 2)
    assert found.num_equal == 1
    assert found.tensors == [
        TensorDifference("dtype", "form", "F32 [1]", "I32 [1]"),
        TensorDifference("gone", "gone", "F32 [1]", ""),
        TensorDifference("new", "new", "", "F32 [1]"),
        TensorDifference("shape", "form", "F32 [2]", "F32 [3]"),
        TensorDifference("w", "changed", "F32 [2]", "F32 [2]", Numbers(2, 1, 2.0, 1 / 3, 2.0, 0)),
    ]


def test_only_objects_that_differ_are_read(store: MemoryStore) -> None:
    run = Publisher(store, shard_bytes=1024)
    made = {f"w{i}": tensor("F32", W[:256] + i) for i in range(8)}
    run.publish(1, made)
    run.publish(2, {**made, "w3": tensor("F32", W[:256] * 2)})
    found = difference(store, 1, 2)
    assert [one.name for one in found.tensors] == ["w3"]
    assert found.bytes_read == found.bytes_left + found.bytes_right
    assert found.bytes_shared == 7 * found.bytes_left


def test_equal_pieces_of_a_large_tensor_are_not_read(store: MemoryStore) -> None:
    run = Publisher(store, shard_bytes=1024)
    run.publish(1, {"w": tensor("F32", W)})
    changed = W.copy()
    changed[700] += 3
    run.publish(2, {"w": tensor("F32", changed)})
    found = difference(store, 1, 2)
    assert [one.numbers for one in found.tensors] == [Numbers(1000, 1, 3.0, 3 / 703, 3.0, 0)]
    assert found.bytes_read == found.bytes_left + found.bytes_right < 3 * 1024 < found.bytes_shared


def test_tensors_that_were_cut_at_other_places_are_compared_whole(store: MemoryStore) -> None:
    run, changed = Publisher(store), W.copy()
    changed[[0, 999]] += 1
    for step, (cut, values) in enumerate([(2048, W), (3000, W), (3000, changed), (512, changed)]):
        run.shard_bytes = cut
        run.publish(step, {"w": tensor("F32", values)})
    assert difference(store, 0, 1).equal
    assert difference(store, 2, 3).equal
    for left, right in ((0, 2), (1, 2), (1, 3)):
        (one,) = difference(store, left, right).tensors
        assert one.numbers is not None
        assert one.numbers.changed == 2


def test_equal_content_on_two_stores_is_found_by_its_names(store: MemoryStore) -> None:
    other = MemoryStore()
    Publisher(store).publish(3, {"w": floats(1, 2)})
    Publisher(other, "another").publish(5, {"w": floats(1, 2)})
    found = compare(Published(store, "r").at(None), Published(other, "another").at(None))
    assert found.equal
    assert found.bytes_read == 0


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_differences_of_floats_are_those_of_their_values(dtype: str) -> None:
    kind = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
    dice = np.random.default_rng(0)
    left = dice.normal(size=3000).astype(kind)
    right = left.copy()
    right[::3] += dice.normal(size=1000).astype(kind)
    a, b = left.astype(np.float64), right.astype(np.float64)
    found = numbers_of(dtype, left, right)
    assert (found.elements, found.changed, found.not_finite) == (3000, int((a != b).sum()), 0)
    assert found.share == found.changed / 3000
    assert found.max_abs == np.abs(b - a).max()
    assert found.max_rel == (np.abs(b - a) / np.maximum(np.abs(a), np.abs(b))).max()
    assert found.l2 == pytest.approx(np.linalg.norm(b - a))


def test_bfloat16_is_compared_as_torch_reads_it() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    left = torch.randn(5000).bfloat16()
    right = left * torch.where(torch.arange(5000) % 7 == 0, 1.5, 1.0).bfloat16()
    found = numbers_of("BF16", *(one.view(torch.uint16).numpy() for one in (left, right)))
    distance = (right.double() - left.double()).abs()
    assert found.changed == int((left != right).sum())
    assert found.max_abs == distance.max().item()
    assert found.l2 == pytest.approx(distance.norm().item())


def test_integers_are_counted_and_not_measured() -> None:
    found = numbers_of("I64", np.array([1, 2, 3]), np.array([1, 5, 3]))
    assert found == Numbers(3, 1, None, None, None, None)


def test_numbers_that_are_not_finite_are_counted_apart() -> None:
    nan, inf = math.nan, math.inf
    left = np.array([nan, nan, 1, inf, 0.0, 1], np.float32)
    right = np.array([nan, 1, nan, -inf, -0.0, 2], np.float32)
    assert numbers_of("F32", left, right) == Numbers(6, 5, 1.0, 0.5, 1.0, 3)


def test_a_difference_beyond_float64_is_left_out() -> None:
    huge = np.array([1.7e308])
    assert numbers_of("F64", huge, -huge) == Numbers(1, 1, None, None, None, 0)


# ---------------------------------------------------------------------- fields


def test_fields_are_those_in_force_at_each_checkpoint(store: MemoryStore) -> None:
    run = Publisher(store, settings={"training": {"learning_rate": 0.1, "steps": 5}})
    run.publish(1, {"w": floats(1)}, updates=1)
    run.change_settings(training__learning_rate="0.1 -> 0.2")
    run.publish(2, {"w": floats(1)}, updates=2)
    assert difference(store, 1, 2).fields == {
        "meta.updates": (1, 2),
        "settings.training.learning_rate": ("0.1", "0.2"),
    }


def test_two_runs_differ_in_what_they_mean_and_not_in_where_they_lie(store: MemoryStore) -> None:
    settings = {"seed": 1, "run": "r", "storage": {"url": "here"}}
    Publisher(store, "r", {"model": "m", "source": "s"}, settings).publish(1, {"w": floats(1)})
    settings = {"seed": 2, "run": "q", "storage": {"url": "there"}}
    Publisher(store, "q", {"model": "n"}, settings).publish(1, {"w": floats(1)}, rng="x")
    found = compare(Published(store, "r").at(1), Published(store, "q").at(1))
    assert found.fields == {
        "fingerprints.model": ("m", "n"),
        "fingerprints.source": ("s", "absent"),
        "meta.rng": ("absent", "x"),
        "settings.seed": ("1", "2"),
    }
    assert not found.equal


# ---------------------------------------------------------------------- what cannot be compared


def test_a_step_without_a_checkpoint_is_named_beside_those_that_have_one(store: MemoryStore) -> None:
    run = Publisher(store)
    with pytest.raises(UnknownCheckpoint, match="steps: none"):
        Published(store, "r").at(None)
    run.publish(4, {"w": floats(1)})
    run.publish(8, {"w": floats(1)})
    with pytest.raises(UnknownCheckpoint, match="steps: 4, 8"):
        Published(store, "r").at(5)
    with pytest.raises(UnknownRun):
        Published(store, "q")


def test_the_checkpoint_of_a_step_is_the_one_published_last(store: MemoryStore) -> None:
    run = Publisher(store)
    run.publish(4, {"w": floats(1)})
    run._incarnation += 1  # a manifest's name holds the incarnation; the journal does not mind here
    newest = run.publish(4, {"w": floats(2)})
    assert (
        Published(store, "r").at(4).manifest.state_digest
        in store.read(f"runs/r/checkpoints/{newest.manifest}").decode()
    )


def test_a_damaged_object_is_refused_where_it_must_be_read(store: MemoryStore) -> None:
    run = Publisher(store)
    run.publish(1, {"w": floats(1)})
    run.publish(2, {"w": floats(2)})
    key = RunPaths("r").object(next(iter(Published(store, "r").at(2).manifest.objects)))
    store._objects[key] = store._objects[key][:-1] + b"\0"
    assert difference(store, 2, 2).equal
    with pytest.raises(ArtifactCorrupt):
        difference(store, 1, 2)


def test_a_retired_checkpoint_is_not_compared_and_the_error_says_which_are_there() -> None:
    store = MemoryStore()
    publisher = Publisher(store)
    first = publisher.publish(1, {"w": floats(1.0)})
    publisher.publish(2, {"w": floats(2.0)})
    publisher._record(Retired((first.manifest,), (), ()))
    assert Published(store, "r").at(None).manifest.step == 2
    with pytest.raises(UnknownCheckpoint, match="steps: 2"):
        Published(store, "r").at(1)
