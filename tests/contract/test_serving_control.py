"""Control of a running engine by our client: abort, pause, cache, weights, memory, state; alike on both servers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import sys
import time
import types
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from live_servers import Server
from tiny_model import CONTEXT_LENGTH, EOS, Reference, build_weights

from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.errors import EngineError, WeightSyncError
from rlrecipes.weight_sync.buckets import to_buckets
from rlrecipes.weight_sync.handles import HandleTransport, SharingEngine
from rlrecipes.weight_sync.session import run_sync
from rlrecipes.weight_sync.transports import Destination, DistributedTransport, TensorTransport

pytestmark = pytest.mark.xdist_group("serving")
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
VOCABULARY_MULTIPLE = 64
LONG = 960
"""Tokens of a request that is still running when the next call arrives, and that a test can wait for."""


@pytest.fixture(scope="session")
def long_answer(reference: Reference) -> list[int]:
    return reference.greedy(reference.prompt, LONG)


@pytest.fixture
def client(server: Server) -> EngineClient:
    return EngineClient(server.url)


def compute_checksums(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """As an engine does: fused rows, a padded vocabulary, the first 8 bytes of SHA-256."""
    fused: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        if "embed_tokens" in name or "lm_head" in name:
            padding = -len(tensor) % VOCABULARY_MULTIPLE
            tensor = torch.cat([tensor, torch.zeros(padding, tensor.shape[1])])
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            for part in parts:
                name = name.replace(f".{part}.", f".{whole}.")
        fused.setdefault(name, []).append(tensor)
    return {
        name: hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]
        for name, tensors in fused.items()
    }


def assert_serves(server: Server, reference: Reference, weights: dict[str, torch.Tensor], version: str) -> None:
    """The server computes with these weights, and says so."""
    ranks = server.ok("/weights_checker", {"action": "checksum"})["ranks"]
    assert ranks[0]["checksums"] == compute_checksums(weights)
    assert server.ok("/model_info")["weight_version"] == version
    answer = server.generate(reference.prompt, max_new_tokens=6, ignore_eos=True)
    assert answer["meta_info"]["weight_version"] == version
    ids = torch.tensor([reference.prompt + answer["output_ids"]])
    with torch.no_grad():
        logits = torch.func.functional_call(reference.model, weights, (ids,)).logits
    rows = torch.log_softmax(logits[0, len(reference.prompt) - 1 : -1], -1)
    expected = rows.gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    found = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(rows.argmax(-1), torch.tensor(answer["output_ids"]))


def test_abort_ends_one_request_and_keeps_what_it_has(
    server: Server, client: EngineClient, reference: Reference, long_answer: list[int]
) -> None:
    one, two = server.start_long(reference.prompt, "run-1"), server.start_long(reference.prompt, "run-2", LONG)
    asyncio.run(client.abort_request("run-1"))
    answer = one.result(30)
    size = len(answer["output_ids"])
    assert answer["meta_info"]["finish_reason"] == ABORTED and 0 < size < 1900
    size = min(size, LONG)
    assert answer["output_ids"][:size] == long_answer[:size]
    assert answer["text"] == reference.decode(answer["output_ids"])
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    assert two.result(30)["output_ids"] == long_answer


def test_abort_takes_requests_along_whose_id_begins_alike(
    server: Server, client: EngineClient, reference: Reference
) -> None:
    other = server.start_long(reference.prompt, "other-12", LONG)
    asyncio.run(client.abort_request("other-1"))  # no request has just this id
    assert other.result(30)["meta_info"]["finish_reason"]["type"] == "length"
    one, two = server.start_long(reference.prompt, "rollout-1"), server.start_long(reference.prompt, "rollout-12")
    asyncio.run(client.abort_request("rollout-1"))
    assert [future.result(30)["meta_info"]["finish_reason"] for future in (one, two)] == [ABORTED] * 2


def test_abort_all(server: Server, client: EngineClient, reference: Reference) -> None:
    futures = [server.start_long(reference.prompt, f"all-{index}") for index in range(3)]
    asyncio.run(client.abort_request())
    assert [future.result(30)["meta_info"]["finish_reason"] for future in futures] == [ABORTED] * 3


def test_aborting_what_is_not_there_is_no_error(server: Server, client: EngineClient) -> None:
    asyncio.run(client.abort_request("never seen"))
    assert server.raw("/abort_request", {}) == (200, b"")
    assert server.call("/abort_request", method="POST")[0] == 400


def test_a_request_id_cannot_run_twice_at_once(server: Server, client: EngineClient, reference: Reference) -> None:
    running = server.start_long(reference.prompt, "same")
    body = {"input_ids": reference.prompt, "rid": "same", "sampling_params": {"max_new_tokens": 2}}
    status, answer = server.call("/generate", body)
    assert status == 400 and "Duplicate request ID" in answer["error"]["message"]
    asyncio.run(client.abort_request("same"))
    running.result(30)
    server.ok("/generate", body)


def test_the_cache_is_not_flushed_under_a_running_request(
    server: Server, client: EngineClient, reference: Reference
) -> None:
    running = server.start_long(reference.prompt, "busy", LONG)
    assert server.raw("/flush_cache", {}) == (400, b"Flush cache failed.\n")
    assert server.call("/flush_cache?timeout=20", {})[0] == 200 and running.done()
    assert server.call("/flush_cache")[0] == server.call("/flush_cache", method="POST")[0] == 200
    running = server.start_long(reference.prompt, "busy", LONG)
    with pytest.raises(EngineError, match="refused for 0.05 s"):
        asyncio.run(client.flush_cache(timeout_s=0.05))
    asyncio.run(client.flush_cache(timeout_s=20))
    assert running.done()


def test_pause_abort_ends_running_requests_and_new_ones_wait(
    restored: Server, client: EngineClient, reference: Reference, long_answer: list[int]
) -> None:
    running = restored.start_long(reference.prompt, "early", LONG)
    asyncio.run(client.pause("abort"))
    answer = running.result(30)
    assert answer["meta_info"]["finish_reason"] == ABORTED
    assert answer["output_ids"] == long_answer[: len(answer["output_ids"])]
    waiting = restored.start(restored.generate, reference.prompt, body={"rid": "late"})
    asyncio.run(client.flush_cache())
    assert not waiting.done()
    asyncio.run(client.continue_generation())
    assert waiting.result(30)["output_ids"] == long_answer[:8]


@pytest.mark.parametrize(("mode", "num_retractions"), [("retract", 1), ("in_place", 0)])
def test_the_other_pauses_keep_running_requests(
    restored: Server,
    client: EngineClient,
    reference: Reference,
    long_answer: list[int],
    mode: str,
    num_retractions: int,
) -> None:
    running = restored.start_long(reference.prompt, "early", LONG)
    asyncio.run(client.pause(mode))
    assert restored.raw("/flush_cache", {}) == (400, b"Flush cache failed.\n")  # retracted, it still waits
    waiting = restored.start(restored.generate, reference.prompt, body={"rid": "late"})
    assert restored.call("/health")[0] == 503
    for path in ("/model_info", "/server_info", "/v1/loads", "/v1/models"):
        restored.ok(path)
    assert not running.done() and not waiting.done()
    asyncio.run(client.continue_generation())
    answer = running.result(30)
    assert answer["output_ids"] == long_answer and answer["meta_info"]["num_retractions"] == num_retractions
    expected = reference.logprobs(reference.prompt + long_answer)[len(reference.prompt) - 1 :]
    found = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    wanted = expected.gather(1, torch.tensor(long_answer)[:, None])[:, 0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert waiting.result(30)["output_ids"] == long_answer[:8]
    assert asyncio.run(client.health())


def test_aborts_while_paused(restored: Server, client: EngineClient, reference: Reference) -> None:
    running = restored.start_long(reference.prompt, "kept")
    asyncio.run(client.pause("in_place"))
    body = {"input_ids": reference.prompt, "rid": "queued", "sampling_params": {"max_new_tokens": 4}}
    waiting = restored.start(restored.call, "/generate", body)
    time.sleep(0.5)  # nothing tells that it has arrived
    asyncio.run(client.abort_request())
    assert not waiting.done() and not running.done()
    asyncio.run(client.continue_generation())
    assert running.result(30)["meta_info"]["finish_reason"] == ABORTED
    assert waiting.result(30) == (499, {"error": {"message": "Request queued was aborted"}})
    running = restored.start_long(reference.prompt, "retracted")
    asyncio.run(client.pause("retract"))
    asyncio.run(client.abort_request("retracted"))
    answer = running.result(5)  # while still paused
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}


def test_pause_and_continue_say_what_they_did(restored: Server) -> None:
    paused = {"message": "Generation paused successfully.", "status": "ok"}
    assert restored.call("/pause_generation", {"mode": "retract"}) == (200, paused)
    assert restored.call("/pause_generation", {"mode": "in_place"}) == (200, paused)
    assert restored.call("/pause_generation", {"mode": "sideways"})[0] == 400
    assert restored.call("/pause_generation", method="POST")[0] == 400
    continued = {"message": "Generation continued successfully.", "status": "ok"}
    assert restored.call("/continue_generation", {}) == restored.call("/continue_generation", {}) == (200, continued)
    assert restored.call("/continue_generation", method="POST")[0] == 400


def serialize(content: Any) -> str:
    torch.multiprocessing.set_sharing_strategy("file_system")
    stream = io.BytesIO()
    ForkingPickler(stream).dump(content)
    return base64.b64encode(stream.getvalue()).decode()


def flatten(weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's flattened bucket, whose descriptions are pickled under SGLang's own name."""
    path = "sglang.srt.weight_sync.tensor_bucket"
    described = type("FlattenedTensorMetadata", (), {"__module__": path})
    for size in range(1, 5):
        name = ".".join(path.split(".")[:size])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[path], "FlattenedTensorMetadata", described, raising=False)
    metadata, start = [], 0
    for name, tensor in weights.items():
        entry, size = described(), tensor.numel() * tensor.element_size()
        vars(entry).update(name=name, shape=tensor.shape, dtype=tensor.dtype)
        vars(entry).update(start_idx=start, end_idx=start + size, numel=size)
        metadata.append(entry)
        start += size
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in weights.values()])
    return {"flattened_tensor": flat, "metadata": metadata}


def test_weights_from_tensors(restored: Server, client: EngineClient, reference: Reference) -> None:
    weights = build_weights(reference, seed=1)
    body = {"serialized_named_tensors": [serialize(list(weights.items()))], "weight_version": "1"}
    answer = restored.ok("/update_weights_from_tensor", body)
    assert answer == {"success": True, "message": "Success Weight version updated to 1."}
    assert_serves(restored, reference, weights, "1")
    assert asyncio.run(client.weight_version()) == 1


def test_weights_from_a_flattened_bucket(
    restored: Server, client: EngineClient, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = build_weights(reference, seed=2)
    payload = serialize(flatten(weights, monkeypatch))
    asyncio.run(client.update_weights_from_tensor([payload], load_format="flattened_bucket"))
    asyncio.run(client.update_weight_version(2))
    asyncio.run(client.flush_cache())
    assert_serves(restored, reference, weights, "2")


@pytest.mark.parametrize("transport", ["tensor", "distributed", "handles"])
def test_weights_by_our_transports_in_the_order_of_a_sync(
    restored: Server, client: EngineClient, reference: Reference, transport: str
) -> None:
    weights = build_weights(reference, seed=3)
    destinations = [Destination(client, 1)]
    restored.generate(reference.prompt)

    async def sync() -> None:
        road: Any = TensorTransport(destinations)
        if transport == "distributed":
            road = DistributedTransport(
                destinations,
                address="127.0.0.1",
                port=find_free_port(),
                group_name="weights-0",
                backend="gloo",
                timeout_s=30,
            )
        if transport == "handles":
            road = HandleTransport([SharingEngine(client, (0,))], device="cpu")
        else:
            await road.connect()
        await client.pause("abort")
        await client.flush_cache()
        await client.begin_weight_update()
        for bucket in to_buckets(iter(weights.items()), 20_000):
            await road.send(bucket)
        await client.end_weight_update()
        await client.update_weight_version(3)
        assert await client.weights_checksum() == compute_checksums(weights)
        await client.continue_generation()
        if transport != "handles":
            await road.close()

    asyncio.run(sync())
    assert_serves(restored, reference, weights, "3")


def score(server: Server, ids: list[int]) -> tuple[int, torch.Tensor]:
    """Cached tokens of a greedy answer to these tokens, and the logprobs of its tokens."""
    meta = server.generate(ids, max_new_tokens=6, ignore_eos=True)["meta_info"]
    return meta["cached_tokens"], torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])


@pytest.mark.parametrize("is_answering", [False, True], ids=["idle", "answering"])
def test_no_prefix_of_the_old_weights_outlives_a_sync(
    restored: Server,
    client: EngineClient,
    other_model: tuple[Path, dict[str, torch.Tensor]],
    reference: Reference,
    is_answering: bool,
) -> None:
    path, weights = other_model
    prefix = reference.prompt + reference.encode(" and a prefix that later prompts share")
    prompts = [prefix, prefix + reference.encode("!"), reference.prompt]
    restored.ok("/update_weights_from_disk", {"model_path": str(path), "flush_cache": False})
    restored.ok("/flush_cache?timeout=10", {})
    wanted = []
    for ids in prompts:  # by the new weights, with nothing cached
        restored.ok("/flush_cache?timeout=10", {})
        wanted.append(score(restored, ids))
    restored.ok("/update_weights_from_disk", {"model_path": str(reference.path), "flush_cache": False})
    restored.ok("/flush_cache?timeout=10", {})
    score(restored, prefix)
    num_cached, old = score(restored, prefix)
    assert num_cached > 0 and (old - wanted[0][1]).abs().max() > 0.1

    restored.ok("/update_weights_from_disk", {"model_path": str(path), "flush_cache": False})
    num_cached, stale = score(restored, prefix)  # the fault: new weights over a prefix of the old ones
    assert num_cached > 0 and (stale - wanted[0][1]).abs().max() > 1e-3
    restored.ok("/update_weights_from_disk", {"model_path": str(reference.path), "flush_cache": False})

    score(restored, prefix)
    running = [restored.start_long(prefix, "across")] if is_answering else []

    async def send() -> dict[str, str]:
        await client.update_weights_from_disk(str(path))
        return compute_checksums(weights)

    options = {"pause_mode": "abort", "should_bracket": False, "should_verify": True, "timeout_s": 60}
    asyncio.run(run_sync([client], send, version=8, **options))
    assert [answer.result(30)["meta_info"]["finish_reason"] for answer in running] == [ABORTED] * is_answering
    for ids, (_, logprobs) in zip(prompts, wanted, strict=True):
        torch.testing.assert_close(score(restored, ids)[1], logprobs, atol=1e-5, rtol=0)


def test_weights_from_disk(
    restored: Server, client: EngineClient, reference: Reference, other_model: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, weights = other_model
    restored.generate(reference.prompt)
    restored.ok("/flush_cache?timeout=10", {})  # the real one dies when it flushes within an update and is not idle yet
    answer = restored.ok("/update_weights_from_disk", {"model_path": str(path), "weight_version": "4"})
    message = "Succeeded to update model weights. Weight version updated to 4."
    assert answer == {"success": True, "message": message, "num_paused_requests": 0}
    assert restored.generate(reference.prompt)["meta_info"]["cached_tokens"] == 0
    assert_serves(restored, reference, weights, "4")
    with pytest.raises(WeightSyncError, match="/update_weights_from_disk answered 400"):
        asyncio.run(client.update_weights_from_disk(str(path / "missing")))
    assert_serves(restored, reference, weights, "4")


def test_part_of_the_weights_can_be_updated(restored: Server, client: EngineClient, reference: Reference) -> None:
    part = {"lm_head.weight": build_weights(reference, seed=5)["lm_head.weight"]}
    payload = serialize([*part.items(), ("of.another.model", torch.zeros(2))])
    asyncio.run(client.update_weights_from_tensor([payload]))
    asyncio.run(client.flush_cache())
    assert_serves(restored, reference, dict(reference.model.state_dict()) | part, "default")


def test_an_update_waits_for_running_requests_unless_paused(
    restored: Server,
    client: EngineClient,
    reference: Reference,
    long_answer: list[int],
    other_model: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    body = {"model_path": str(other_model[0]), "flush_cache": False}
    running = restored.start_long(reference.prompt, "before", LONG)
    restored.ok("/update_weights_from_disk", {**body, "model_path": str(reference.path)})
    assert running.result(5)["output_ids"] == long_answer
    running = restored.start_long(reference.prompt, "across", LONG)
    asyncio.run(client.pause("in_place"))
    restored.ok("/update_weights_from_disk", {**body, "weight_version": "6"})
    assert not running.done()
    asyncio.run(client.continue_generation())
    answer = running.result(30)
    assert len(answer["output_ids"]) == LONG and answer["output_ids"] != long_answer
    assert answer["output_ids"][:2] == long_answer[:2] and answer["meta_info"]["weight_version"] == "6"


def test_bad_updates_are_refused(server: Server, client: EngineClient, reference: Reference) -> None:
    payload = serialize([("model.norm.weight", torch.ones(64))])
    body = {"serialized_named_tensors": [payload], "weight_version": 3}
    assert server.call("/update_weights_from_tensor", body)[0] == 400  # a version is a string
    assert server.call("/update_weights_from_tensor", {"serialized_named_tensors": ["!"]})[0] == 400
    assert server.call("/update_weight_version", {})[0] == 400
    with pytest.raises(WeightSyncError, match=f"{server.url}.*\n?.*destroy_weights_update_group answered 400"):
        asyncio.run(client.destroy_weights_update_group(group_name="never joined"))
    status, answer = server.call("/weights_checker", {"action": "guess"})
    assert status == 400 and answer["success"] is False
    assert_serves(server, reference, dict(reference.model.state_dict()), "default")


def test_the_version_can_be_set_alone(restored: Server) -> None:
    answer = restored.ok("/update_weight_version", {"new_version": "17", "abort_all_requests": False})
    assert answer == {"success": True, "message": "Weight version updated to 17", "new_version": "17"}
    assert restored.generate([5])["meta_info"]["weight_version"] == "17"


def test_checksums_name_ranks_and_sum_up(server: Server, reference: Reference) -> None:
    answer = server.ok("/weights_checker", {"action": "checksum"})
    assert set(answer) == {"success", "message", "ranks", "per_engine_checksum"} and answer["success"]
    (rank,) = answer["ranks"]
    checksums = compute_checksums(dict(reference.model.state_dict()))
    assert rank["checksums"] == checksums
    overall = hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()
    assert rank["per_gpu_checksum"] == overall
    assert answer["per_engine_checksum"] == hashlib.sha256(overall.encode()).hexdigest()
    sizes = {f"{axis}_{what}": what == "size" for axis in ("tp", "dp", "pp") for what in ("rank", "size")}
    assert rank["parallelism_info"] == sizes | {"rank": 0, "size": 1}


def test_memory_is_released_and_resumed(
    restored: Server, client: EngineClient, reference: Reference, long_answer: list[int]
) -> None:
    restored.generate(reference.prompt)
    for tags in (["kv_cache"], ["weights", "kv_cache"]):
        asyncio.run(client.release_memory(tags))
        asyncio.run(client.resume_memory(tags))
        asyncio.run(client.update_weights_from_disk(str(reference.path)))
        answer = restored.generate(reference.prompt)
        assert answer["output_ids"] == long_answer[:8] and answer["meta_info"]["cached_tokens"] == 0
    restored.ok("/flush_cache?timeout=10", {})
    assert restored.raw("/release_memory_occupation", {}) == (200, b"null")
    assert restored.raw("/resume_memory_occupation", {}) == (200, b"null")


def test_an_engine_that_sleeps_keeps_requests_waiting_and_wakes_with_new_weights(
    restored: Server, client: EngineClient, reference: Reference
) -> None:
    """The cycle of a colocated run: memory goes while it is paused, and comes in two parts around the weights."""
    weights = build_weights(reference, seed=8)
    torch.multiprocessing.set_sharing_strategy("file_system")
    restored.generate(reference.prompt)

    async def sleep() -> None:
        await client.pause("abort")
        await client.release_memory(["weights", "kv_cache"])

    async def wake() -> None:
        await client.resume_memory(["weights"])
        await client.begin_weight_update()
        for bucket in to_buckets(iter(weights.items()), 20_000):
            await HandleTransport([SharingEngine(client, (0,))], device="cpu").send(bucket)
        await client.end_weight_update()
        await client.update_weight_version(8)
        assert await client.weights_checksum() == compute_checksums(weights)
        await client.resume_memory(["kv_cache"])
        await client.continue_generation()

    for _ in range(2):
        asyncio.run(sleep())
        early = restored.start(restored.generate, reference.prompt)
        time.sleep(0.3)
        assert not early.done()
        asyncio.run(wake())
        assert early.result(30)["meta_info"]["weight_version"] == "8"
        assert_serves(restored, reference, weights, "8")


def test_state_is_told(server: Server, client: EngineClient, reference: Reference) -> None:
    assert server.raw("/health") == (200, b"") and asyncio.run(client.health_generate())
    info = server.ok("/model_info")
    assert info["model_path"] == info["tokenizer_path"] == str(reference.path)
    assert (info["is_generation"], info["weight_version"], info["model_type"]) == (True, "default", "qwen3")
    assert info["architectures"] == ["Qwen3ForCausalLM"] and server.ok("/get_model_info").keys() == info.keys()
    assert {"has_image_understanding", "has_audio_understanding", "preferred_sampling_params"} <= set(info)
    state = server.ok("/server_info")
    assert (state["model_path"], state["tp_size"], state["dp_size"], state["status"]) == (
        str(reference.path),
        1,
        1,
        "ready",
    )
    assert state["max_total_num_tokens"] > 0 and state["version"] and state["internal_states"][0]
    assert server.ok("/get_server_info").keys() == state.keys()
    (model,) = server.ok("/v1/models")["data"]
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"} == set(model)
    assert (model["id"], model["max_model_len"]) == (str(reference.path), CONTEXT_LENGTH)
    assert server.call("/v1/models/other")[0] == 404
    assert server.call("/get_weight_version")[0] == 404  # deprecated there
    paths = asyncio.run(client.paths())
    assert {"/generate", "/update_weights_from_tensor", "/v1/chat/completions"} <= paths
    assert "/begin_weight_update" not in paths  # 0.5.17


def keys_of(answer: Any) -> set[str]:
    """Paths of all keys, lists by their first entry."""
    if isinstance(answer, list):
        return keys_of(answer[0]) if answer else set()
    if not isinstance(answer, dict):
        return set()
    return set(answer) | {f"{key}.{inner}" for key, value in answer.items() for inner in keys_of(value)}


@pytest.mark.parametrize("server", ["sglang"], indirect=True)
def test_the_embedded_server_invents_no_field(server: Server, servers: dict[str, Server], reference: Reference) -> None:
    embedded = servers["embedded"]
    for path in ("/model_info", "/v1/loads?include=core"):  # of which it has the part that somebody reads
        assert keys_of(embedded.ok(path)) <= keys_of(server.ok(path)), path
    assert set(embedded.ok("/server_info")) <= set(server.ok("/server_info"))
    assert keys_of(embedded.ok("/v1/models")) == keys_of(server.ok("/v1/models"))
    body = {"top_logprobs_num": 2, "logprob_start_len": 1, "token_ids_logprob": [5]}
    for extra in ({}, body):
        answers = []
        for one in (embedded, server):
            one.ok("/flush_cache", {})
            answers.append(one.generate(reference.prompt, body=extra))
        assert keys_of(answers[0]) == keys_of(answers[1])


def test_loads_count_requests_and_tokens(
    flushed: Server, client: EngineClient, reference: Reference, long_answer: list[int]
) -> None:
    keys = {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
    core = flushed.ok("/v1/loads?include=core")
    assert set(core) == keys and set(flushed.ok("/v1/loads")) == keys
    counted = {"dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens"}
    assert counted <= set(core["loads"][0]) and core["loads"][0]["dp_rank"] == 0
    futures = [flushed.start_long(reference.prompt, f"load-{index}") for index in range(2)]

    async def watch() -> None:
        while (load := await client.load()).num_running_requests != 2:
            assert not all(future.done() for future in futures), load
        assert load.num_waiting_requests == 0 and 0 < load.kv_cache_use_fraction < 1
        await client.abort_request()

    asyncio.run(watch())
    assert EOS not in long_answer[:1] and all(future.result(30) for future in futures)
