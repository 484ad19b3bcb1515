"""Token rows and content-addressed checkpoints."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import safetensors

from storage import payload
from storage.buffers import NamedBuffer, buffers_digest, from_safetensors, to_safetensors
from storage.capture import Capture, CaptureBuffers, capture_of
from storage.checkpoint import Written, check_objects, read_buffers, read_manifest
from storage.errors import ArtifactCorrupt, ReferenceInvalid, RestoreRefused, SchemaUnsupported
from storage.filesystem import Store
from storage.layout import SHARD_BYTES
from storage.ledger import Block
from storage.memory import MemoryStore
from storage.payload import TurnRow, VersionSpan, decode_block, encode_block
from storage.publisher import Newest, ThreadPublisher
from storage.reader import PayloadReader
from storage.restore import RestorePlan, load_base
from storage.runs import RunPaths
from storage.schema import CheckpointPublished


def row(turn: int = 0, start: int = 0, done: bool = True, **changes: object) -> TurnRow:
    made = TurnRow(
        4, 1, 0, turn, 0, start, np.array([5, 6, 7], np.int32), np.array([0, -0.5, -0.25], np.float32),
        np.array([0, 1, 1], np.int8), (VersionSpan(1, 3, 1), VersionSpan(1, 4, 2)), done, 0.5, '{"text":"ü"}',
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_rows_read_back_exactly() -> None:
    rows = [
        row(),
        row(turn=1, start=3),
        row(sample=2, spans=(), mask=np.zeros(3, np.int8), tokens=np.array([1, 2, 3], np.int32)),
    ]
    block = encode_block("1-w-1", rows)
    back = decode_block(block.data, block.digest, "x")
    for a, b in zip(rows, back, strict=True):
        for name in TurnRow.__slots__:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_a_block_of_other_columns_is_refused_and_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    block = encode_block("1-w-1", [row()])
    assert b"tidegate-payload 1 " in block.data
    monkeypatch.setattr(payload, "FORMAT", b"tidegate-payload 1 0123456789abcdef")
    with pytest.raises(SchemaUnsupported, match="0123456789abcdef"):
        decode_block(block.data, block.digest, "x")


def test_an_altered_block_is_corrupt() -> None:
    block = encode_block("1-w-1", [row()])
    dice = random.Random(0)
    for position in range(0, len(block.data), 11):
        altered = bytearray(block.data)
        altered[position] ^= 1 << dice.randrange(8)
        with pytest.raises(ArtifactCorrupt):
            decode_block(bytes(altered), block.digest, "x")


def test_a_reader_prefers_hot_copies_and_names_missing_rows_and_blocks() -> None:
    store = MemoryStore()
    block = encode_block("1-w-1", [row()])
    blocks = {"1-w-1": Block(block.digest, len(block.data), inline=False)}
    reader = PayloadReader(store, "r", {"1-w-1": block.data}.get)
    assert reader.rows([("1-w-1", 0)], blocks)[0].group == 4
    for references, code in (([("1-w-1", 1)], "row_missing"), ([("other", 0)], "orphan")):
        with pytest.raises(ReferenceInvalid) as caught:
            reader.rows(references, blocks)
        assert caught.value.code == code
    cold = PayloadReader(store, "r")
    with pytest.raises(ReferenceInvalid, match="no such object"):
        cold.rows([("1-w-1", 0)], blocks)
    store.create(RunPaths("r").block("1-w-1"), block.data)
    assert cold.rows([("1-w-1", 0)], blocks)[0].reward == 0.5


def buffers(seed: int = 0, sizes: tuple[int, ...] = (3, 1000, 70)) -> dict[str, NamedBuffer]:
    dice = np.random.default_rng(seed)
    return {
        f"w{i}": NamedBuffer("F32", (size,), dice.integers(0, 255, size * 4, dtype=np.uint8))
        for i, size in enumerate(sizes)
    }


def capture(step: int, made: dict[str, NamedBuffer], shard_bytes: int = SHARD_BYTES) -> Capture:
    return capture_of(step, buffers_digest(made, "{}"), "w", "{}", made, buffers=CaptureBuffers(shard_bytes))


def publish(store: Store, captured: Capture, newest: Newest | None = None) -> Written:
    return ThreadPublisher(store).publish("r", 1, captured, newest)


def test_the_layout_is_what_the_safetensors_library_reads() -> None:
    made = buffers()
    found = dict(safetensors.deserialize(bytes(to_safetensors(made))))
    assert {name: bytes(entry["data"]) for name, entry in found.items()} == {
        n: b.data.tobytes() for n, b in made.items()
    }
    back = from_safetensors(bytes(to_safetensors(made)), "x")
    assert all((back[name].data == made[name].data).all() for name in made)


def test_checkpoints_read_back_and_cut_large_tensors() -> None:
    store, made = MemoryStore(), buffers()
    written = publish(store, capture(5, made, 1024))
    manifest = read_manifest(store, "r", written.name, written.digest)
    assert len(manifest.objects) > 3
    assert {name: len(cut.keys) for name, cut in manifest.cut.items()} == {"w1": 4}
    back = read_buffers(store, "r", manifest)
    assert back.keys() == made.keys()
    assert buffers_digest(back, manifest.meta) == manifest.state_digest
    check_objects(store, "r", manifest)


def test_unchanged_shards_are_not_written_again() -> None:
    store, made = MemoryStore(), buffers(sizes=(250, 250, 250, 250))
    first = publish(store, capture(1, made, 1024))
    changed = {**made, "w2": buffers(9, (1, 1, 250))["w2"]}
    second = publish(store, capture(2, changed, 1024), Newest(first.name, first.digest))
    assert second.size == first.size
    assert second.written < first.written / 2


def test_writing_a_checkpoint_again_is_harmless() -> None:
    store = MemoryStore()
    first = publish(store, capture(1, buffers()))
    again = publish(store, capture(1, buffers()))
    assert (again.digest, again.written) == (first.digest, 0)


def test_an_object_with_other_content_under_its_name_is_never_referenced_but_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    publish(store, capture(1, buffers()))
    key = store.list("runs/r/objects")[0]
    whole, store._objects[key] = store._objects[key], b"altered"
    assert publish(store, capture(1, buffers())).written == len(whole)
    assert store._objects[key] == whole
    assert f"object={key} decision=replace" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "other_run", "schema"])
def test_damage_is_named_before_anything_is_returned(damage: str) -> None:
    store = MemoryStore()
    written = publish(store, capture(1, buffers()))
    key = store.list("runs/r/objects")[0]
    manifest_key = RunPaths("r").manifest(written.name)
    run, digest, expected = "r", written.digest, ArtifactCorrupt
    if damage == "flip":
        store._objects[key] = bytes([store._objects[key][0] ^ 1]) + store._objects[key][1:]
    elif damage == "cut":
        store._objects[key] = store._objects[key][:-1]
    elif damage == "missing":
        del store._objects[key]
    elif damage == "manifest":
        store._objects[manifest_key] += b" "
    elif damage == "other_run":
        run = "r2"
        store._objects[RunPaths("r2").manifest(written.name)] = store._objects[manifest_key]
    else:
        store._objects[manifest_key] = store._objects[manifest_key].replace(b'"schema":1', b'"schema":2')
        digest, expected = __import__("hashlib").sha256(store._objects[manifest_key]).hexdigest(), SchemaUnsupported
    with pytest.raises(expected):
        read_buffers(store, run, read_manifest(store, run, written.name, digest))


def plan_of(store: MemoryStore, steps: list[int], genesis: bool) -> RestorePlan:
    records = []
    for step in steps:
        written = publish(store, capture(step, buffers(step)))
        records.append(CheckpointPublished(step, step, written.name, written.digest, written.size, written.written))
    return RestorePlan("r", max(steps), "", tuple(reversed(records)), genesis, {}, {})


def test_a_damaged_checkpoint_falls_back_to_the_older_one_with_the_reason() -> None:
    store = MemoryStore()
    plan = plan_of(store, [1, 2], genesis=False)
    manifest = read_manifest(store, "r", plan.checkpoints[0].manifest, plan.checkpoints[0].digest)
    store.delete([RunPaths("r").object(next(iter(manifest.objects)))])
    base = load_base(store, plan)
    assert base.step == 1
    assert "checkpoint of step 2" in base.rejected[0]
    assert "missing" in base.rejected[0]


def test_without_any_valid_checkpoint_the_initial_weights_or_an_error_remain() -> None:
    store = MemoryStore()
    plan = plan_of(store, [1], genesis=True)
    store.delete(store.list("runs/r/objects"))
    base = load_base(store, plan)
    assert (base.step, base.manifest, len(base.rejected)) == (0, None, 1)
    with pytest.raises(RestoreRefused, match="checkpoint of step 1"):
        load_base(store, replace(plan, genesis=False))
