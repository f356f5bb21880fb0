"""Buckets hold what they should, checksums see every byte, and a failed sync leaves engines paused."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import torch

from rlrecipes.errors import WeightSyncError
from rlrecipes.weight_sync.buckets import to_buckets
from rlrecipes.weight_sync.checksums import ChecksumTee, compare_checksums
from rlrecipes.weight_sync.session import run_sync


def named(*sizes):
    return [(f"t{i}", torch.arange(size, dtype=torch.float32)) for i, size in enumerate(sizes)]


def test_buckets_keep_order_and_respect_the_limit():
    buckets = list(to_buckets(iter(named(4, 4, 100, 1, 1)), bucket_bytes=32))
    assert [[name for name, _ in bucket.tensors] for bucket in buckets] == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    assert [bucket.num_bytes for bucket in buckets] == [32, 400, 8]


def test_buckets_are_lazy():
    def tensors():
        yield "a", torch.zeros(10)
        yield "b", torch.zeros(10)
        raise AssertionError("nobody asked for more")

    assert next(to_buckets(tensors(), bucket_bytes=40)).tensors[0][0] == "a"


def hash_of(*tensors):
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def test_checksums_speak_of_the_engines_fused_tensors():
    q, k, v, gate, up, norm = (torch.randn(4, 3) for _ in range(6))
    layer = "model.layers.0"
    tensors = [
        (f"{layer}.self_attn.q_proj.weight", q),
        (f"{layer}.self_attn.k_proj.weight", k),
        (f"{layer}.self_attn.v_proj.weight", v),
        (f"{layer}.mlp.gate_proj.weight", gate),
        (f"{layer}.mlp.up_proj.weight", up),
        (f"{layer}.input_layernorm.weight", norm),
        ("model.embed_tokens.weight", torch.ones(63, 2)),
    ]
    tee = ChecksumTee(iter(tensors))
    assert [name for name, _ in tee] == [name for name, _ in tensors]
    assert tee.checksums() == {
        f"{layer}.self_attn.qkv_proj.weight": hash_of(q, k, v),
        f"{layer}.mlp.gate_up_proj.weight": hash_of(gate, up),
        f"{layer}.input_layernorm.weight": hash_of(norm),
        "model.embed_tokens.weight": hash_of(torch.ones(63, 2), torch.zeros(1, 2)),
    }


def test_what_was_hashed_can_still_be_given_away():
    weight = torch.ones(4)
    list(ChecksumTee(iter([("a", weight)])))
    weight.untyped_storage().resize_(0)  # refuses, once numpy has seen it


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"a": "1", "b": "9"}, "1 differ: b"),
        ({"a": "1"}, "1 missing in the engine: b"),
        ({"a": "1", "b": "2", "c": "3"}, "1 unknown to the trainer: c"),
    ],
)
def test_a_difference_is_told_by_name(engine, said):
    with pytest.raises(WeightSyncError, match=said):
        compare_checksums({"a": "1", "b": "2"}, engine, "http://engine")


def test_a_tied_output_layer_is_the_embedding():
    trainer = {"model.embed_tokens.weight": "1"}
    compare_checksums(trainer, {"model.embed_tokens.weight": "1", "lm_head.weight": "1"}, "http://engine")
    with pytest.raises(WeightSyncError):
        compare_checksums(trainer, {"model.embed_tokens.weight": "1", "lm_head.weight": "2"}, "http://engine")


class RecordingEngine:
    """Notes what it is told, in order."""

    url = "http://engine"

    def __init__(self, checksums=None, fails_at="", hangs_at=""):
        self.calls = []
        self.checksums, self.fails_at, self.hangs_at = checksums or {}, fails_at, hangs_at

    def __getattr__(self, name):
        async def call(*arguments, **keywords):
            self.calls.append(name)
            if name == self.hangs_at:
                await asyncio.sleep(60)
            if name == self.fails_at:
                raise WeightSyncError(self.url, f"{name} failed", "look")
            return self.checksums

        return call


def sync(engines, send=None, **changes):
    async def send_nothing():
        return {"a": "1"}

    options = {"version": 3, "pause_mode": "abort", "should_bracket": True, "should_verify": True, "timeout_s": 5.0}
    asyncio.run(run_sync(engines, send or send_nothing, **options | changes))


ORDER = [
    "pause",
    "flush_cache",
    "begin_weight_update",
    "end_weight_update",
    "update_weight_version",
    "weights_checksum",
    "continue_generation",
]


def test_the_order_of_a_sync():
    engines = [RecordingEngine({"a": "1"}), RecordingEngine({"a": "1"})]
    sync(engines)
    assert [engine.calls for engine in engines] == [ORDER, ORDER]


def test_in_place_keeps_the_cache_and_unverified_asks_no_checksum():
    engine = RecordingEngine()
    sync([engine], pause_mode="in_place", should_verify=False)
    assert engine.calls == [name for name in ORDER if name not in ("flush_cache", "weights_checksum")]


def test_an_engine_that_reads_from_disk_is_not_readied_for_buckets():
    engine = RecordingEngine({"a": "1"})
    sync([engine], should_bracket=False)
    assert engine.calls == [name for name in ORDER if name not in ("begin_weight_update", "end_weight_update")]


@pytest.mark.parametrize("fails_at", ORDER[:-1])
def test_an_engine_that_fails_never_continues(fails_at):
    engine = RecordingEngine({"a": "1"}, fails_at=fails_at)
    with pytest.raises(WeightSyncError, match=fails_at):
        sync([engine])
    assert "continue_generation" not in engine.calls


def test_an_engine_with_other_weights_never_continues():
    right, wrong = RecordingEngine({"a": "1"}), RecordingEngine({"a": "2"})
    with pytest.raises(WeightSyncError, match="differ"):
        sync([right, wrong])
    assert "continue_generation" not in right.calls + wrong.calls


def test_a_sync_that_hangs_ends_in_time():
    with pytest.raises(WeightSyncError, match="did not reach"):
        sync([RecordingEngine(hangs_at="pause")], timeout_s=0.2)


class SleepingEngines:
    """Notes in one list what becomes of memory and what each engine is told; the named ones sleep."""

    def __init__(self, asleep):
        self.told, self.asleep = [], asleep

    def is_asleep(self, receiver):
        return receiver in self.asleep

    async def before_weights(self):
        self.told.append("before")

    async def after_weights(self):
        self.told.append("after")


def test_engines_that_sleep_are_paused_already_and_get_memory_around_their_weights():
    asleep, awake = RecordingEngine({"a": "1"}), RecordingEngine({"a": "1"})
    handover = SleepingEngines([asleep])
    awake.calls = asleep.calls = handover.told

    async def send():
        handover.told.append("send")
        return {"a": "1"}

    sync([asleep, awake], send, handover=handover)
    assert handover.told == [
        "pause",  # of the one that is awake
        "flush_cache",
        "before",
        *2 * ["begin_weight_update"],
        "send",
        *2 * ["end_weight_update"],
        *2 * ["update_weight_version"],
        *2 * ["weights_checksum"],
        "after",
        *2 * ["continue_generation"],
    ]


def test_engines_get_no_more_memory_after_a_sync_that_failed():
    engine = RecordingEngine(fails_at="end_weight_update")
    handover = SleepingEngines([engine])
    with pytest.raises(WeightSyncError):
        sync([engine], handover=handover)
    assert handover.told == ["before"]
