"""The process and its HTTP surface: start, stop, streams, pauses, weights."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file
from tiny_engines import save_model

from rlrecipes.engines.embedded.server import main
from rlrecipes.engines.embedded.weight_transfer import UpdateGroups

START_TIMEOUT_S = 60
PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 450, "ignore_eos": True}


def spawn(model_path: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlrecipes.engines.embedded.server", "--model-path", str(model_path), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextmanager
def serving(model_path: Path, *flags: str) -> Iterator[str]:
    process = spawn(model_path, "--port", "0", *flags)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(save_model(tmp_path_factory.mktemp("served"), seed=1), "--weight-version", "3") as address:
        yield address


@dataclass
class Client:
    base: str
    session: aiohttp.ClientSession

    async def post(self, path: str, content: Any = None, expect: int = 200) -> Any:
        async with self.session.post(self.base + path, json=content) as response:
            text = await response.text()
            assert response.status == expect, text
        return json.loads(text) if text[:1] in ("{", "[") else text

    async def get(self, path: str, expect: int = 200) -> Any:
        async with self.session.get(self.base + path) as response:
            text = await response.text()
            assert response.status == expect, text
        return json.loads(text) if text[:1] in ("{", "[") else text

    async def generate(self, parameters: dict[str, Any] | None = None, **more: Any) -> Any:
        return await self.post("/generate", {"input_ids": PROMPT, "sampling_params": parameters or GREEDY, **more})

    async def checksums(self) -> dict[str, str]:
        answer = await self.post("/weights_checker", {"action": "checksum"})
        return dict(answer["ranks"][0]["checksums"])


@asynccontextmanager
async def connected(base: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield Client(base, session)


def drive(url: str, script: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with connected(url) as client:
            await script(client)

    asyncio.run(run())


Capture = pytest.CaptureFixture[str]


def check_start_fails(capsys: Capture, model_path: Path, flags: tuple[str, ...], code: int, words: str) -> None:
    capsys.readouterr()  # progress bars of saving
    try:
        result = main(["--model-path", str(model_path), *flags])
    except SystemExit as stop:
        result = stop.code
    errors = capsys.readouterr().err
    assert result == code
    assert words in errors.splitlines()[-1]
    assert code == 2 or errors.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--tensor-parallel-siz", "1"), 2, "unrecognized arguments: --tensor-parallel-siz"),
        (("--max-total-tokens", "0"), 2, "must be at least 1"),
        (("--max-total-tokens", "3", "--port", "0"), 1, "--max-total-tokens: 3 tokens hold no request"),
        (("--context-length", "9999", "--port", "0"), 1, "--context-length: 9999 is longer than the model's 512"),
        (("--host", "203.0.113.1", "--port", "0"), 1, "cannot listen on 203.0.113.1"),
    ],
)
def test_bad_flags_end_with_one_clear_line(
    capsys: Capture, model_path: Path, flags: tuple[str, ...], code: int, words: str
) -> None:
    check_start_fails(capsys, model_path, flags, code, words)


def test_a_taken_port_is_named(capsys: Capture, model_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        check_start_fails(capsys, model_path, ("--port", str(port)), 1, words)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json: no such file"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda path: (path / "config.json").write_text('{"architectures": ["Foo"]}'), "'Foo' is not supported"),
        (lambda path: (path / "model.safetensors").write_bytes(b"abc"), "safetensors files cannot be read"),
        (lambda path: (path / "model.safetensors").unlink(), "no *.safetensors"),
        (lambda path: (path / "tokenizer.json").write_text("{"), "tokenizer cannot be read"),
    ],
)
def test_a_damaged_model_ends_with_one_clear_line(
    capsys: Capture, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(save_model(tmp_path))
    check_start_fails(capsys, tmp_path, ("--port", "0"), 1, words)


def test_a_failed_start_is_a_failed_process(tmp_path: Path) -> None:
    process = spawn(tmp_path, "--port", "0")
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 1
    assert errors.startswith("error: ") and errors.count("\n") == 1


def test_streams_grow_and_end(url: str) -> None:
    async def script(client: Client) -> None:
        whole = await client.generate(return_logprob=True)
        body = {"input_ids": PROMPT, "sampling_params": GREEDY, "stream": True, "return_logprob": True}
        async with client.session.post(client.base + "/generate", json=body) as response:
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        answers = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        for number, answer in enumerate(answers, start=1):
            assert answer["output_ids"] == whole["output_ids"][:number]
            assert whole["text"].startswith(answer["text"])
            assert len(answer["meta_info"]["output_token_logprobs"]) == number
        assert (answers[-1]["text"], len(answers)) == (whole["text"], 6)
        body["sampling_params"] = {"top_p": 7}
        async with client.session.post(client.base + "/generate", json=body) as response:
            assert "top_p must be in (0, 1], got 7." in await response.text()

    drive(url, script)


def test_pause_in_place_retract_and_abort(url: str) -> None:
    async def script(client: Client) -> None:
        whole = await client.generate(LONG)
        for mode in ("in_place", "retract", "abort"):
            running = asyncio.create_task(client.generate(LONG, rid=mode))
            while (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
                await asyncio.sleep(0)
            await client.post("/pause_generation", {"mode": mode})
            waiting = asyncio.create_task(client.generate())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await client.get("/health", expect=503)
            await client.post("/flush_cache", expect=200 if mode == "abort" else 400)
            load = (await client.get("/v1/loads"))["loads"][0]
            assert (load["num_running_reqs"], load["num_waiting_reqs"]) == {
                "in_place": (1, 0), "retract": (0, 1), "abort": (0, 0),
            }[mode]  # fmt: skip
            await client.post("/continue_generation", {})
            answer = await running
            if mode == "abort":
                assert answer["meta_info"]["finish_reason"]["type"] == "abort"
                assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]
            else:
                assert answer["output_ids"] == whole["output_ids"]
                assert answer["meta_info"]["num_retractions"] == (mode == "retract")
            assert len((await waiting)["output_ids"]) == 6
        await client.get("/health")

    drive(url, script)


def test_abort_keeps_what_was_generated(url: str) -> None:
    async def script(client: Client) -> None:
        whole = await client.generate(LONG)
        for content in ({"rid": "mine"}, {"abort_all": True}):
            running = asyncio.create_task(client.generate({**LONG, "n": 2}, rid="mine", return_logprob=True))
            while (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"] < 2:
                await asyncio.sleep(0)
            await client.post("/abort_request", {"rid": "other"})
            await client.post("/abort_request", content)
            for answer in await running:
                assert answer["meta_info"]["finish_reason"] == {
                    "type": "abort", "message": "Aborted", "status_code": None, "err_type": None,
                }  # fmt: skip
                count = len(answer["output_ids"])
                assert 0 < count < 450
                assert answer["output_ids"] == whole["output_ids"][:count]
                assert len(answer["meta_info"]["output_token_logprobs"]) == count

    drive(url, script)


def test_a_caller_who_leaves_frees_the_memory(url: str) -> None:
    async def script(client: Client) -> None:
        running = asyncio.create_task(client.generate(LONG))
        while (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
            await asyncio.sleep(0)
        running.cancel()
        for _ in range(200):
            load = (await client.get("/v1/loads"))["loads"][0]
            if load["num_running_reqs"] == 0:
                break
            await asyncio.sleep(0.005)
        assert load["num_running_reqs"] == 0
        await client.post("/flush_cache")

    drive(url, script)


FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip


def fuse(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Checksums as documented: fused names, vocabulary padded to 64 rows, first 8 bytes of SHA-256."""
    groups: dict[str, list[torch.Tensor]] = {}
    parts = list(FUSED)
    for name in sorted(state, key=lambda name: next((n for n, part in enumerate(parts) if part in name), -1)):
        part = next((part for part in parts if part in name), "")
        groups.setdefault(name.replace(part, FUSED[part]) if part else name, []).append(state[name])
    sums = {}
    for name, tensors in groups.items():
        whole = torch.cat(tensors)
        if name == "model.embed_tokens.weight":
            whole = torch.cat((whole, torch.zeros(-len(whole) % 64, whole.shape[1])))
        sums[name] = hashlib.sha256(whole.numpy().tobytes()).digest()[:8].hex()
    return sums


def pickle_shared(content: object) -> str:
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(content)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.usefixtures("sglang_names")
def test_weights_come_from_disk_tensors_buckets_and_broadcasts(url: str, tmp_path: Path) -> None:
    other = {
        seed: load_file(save_model(tmp_path / str(seed), seed=seed) / "model.safetensors") for seed in (2, 3, 4, 5)
    }

    async def script(client: Client) -> None:
        async def check(seed: int, version: str) -> None:
            assert await client.checksums() == fuse(other[seed])
            answer = await client.generate()
            assert answer["meta_info"]["weight_version"] == version
            assert answer["meta_info"]["cached_tokens"] == 0
            assert (await client.get("/model_info"))["weight_version"] == version

        await client.generate()
        await client.post("/update_weights_from_disk", {"model_path": str(tmp_path / "2"), "weight_version": "11"})
        await check(2, "11")
        payload = pickle_shared(list(other[3].items()))
        await client.post(
            "/update_weights_from_tensor", {"serialized_named_tensors": [payload], "weight_version": "12"}
        )
        await check(3, "12")
        await client.post("/update_weights_from_tensor", {
            "serialized_named_tensors": [pickle_shared(to_bucket(other[4]))],
            "load_format": "flattened_bucket", "weight_version": "13",
        })  # fmt: skip
        await check(4, "13")
        await broadcast(client, other[5])
        await check(5, "14")

    drive(url, script)


@dataclass
class FlattenedTensorMetadata:
    """Has the fields of SGLang's class, and is pickled under its name."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def to_bucket(state: dict[str, torch.Tensor]) -> dict[str, object]:
    entries, start = [], 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        entries.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + size, size))
        start += size
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in state.values()])
    return {"flattened_tensor": flat, "metadata": entries}


@pytest.fixture
def sglang_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.weight_sync.tensor_bucket")
    module.FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(FlattenedTensorMetadata, "__module__", module.__name__)


async def broadcast(client: Client, state: dict[str, torch.Tensor]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    groups = UpdateGroups()
    joining = threading.Thread(target=groups.join, args=("127.0.0.1", port, 0, 2, "sync", "gloo"))
    joining.start()
    meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    await client.post("/init_weights_update_group", {**meeting, "group_name": "sync", "backend": "gloo"})
    joining.join()
    description = {
        "names": list(state),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()],
        "shapes": [list(tensor.shape) for tensor in state.values()],
        "group_name": "sync",
    }
    answer = asyncio.create_task(
        client.post("/update_weights_from_distributed", {**description, "weight_version": "14"})
    )
    await asyncio.sleep(0)
    for tensor in state.values():
        await asyncio.to_thread(dist.broadcast, tensor, src=0, group=groups._groups["sync"])
    await answer
    await client.post("/destroy_weights_update_group", {"group_name": "sync"})
    await client.post("/destroy_weights_update_group", {"group_name": "sync"}, expect=400)


def test_bad_weights_change_nothing(url: str, tmp_path: Path) -> None:
    small = save_model(tmp_path / "llama", "llama")

    async def script(client: Client) -> None:
        before = await client.checksums()
        for path in (str(small), "/nowhere"):
            await client.post("/update_weights_from_disk", {"model_path": path, "weight_version": "x"}, expect=400)
        evil = base64.b64encode(pickle.dumps([("a", os.system)])).decode()
        half_bad = [("model.norm.weight", torch.zeros(48)), ("model.layers.0.self_attn.q_proj.weight", torch.zeros(3))]
        for payload in ("%%%", evil, pickle_shared(half_bad), pickle_shared([1])):
            await client.post("/update_weights_from_tensor", {"serialized_named_tensors": [payload]}, expect=400)
        description = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
        await client.post("/update_weights_from_distributed", description, expect=400)
        assert await client.checksums() == before
        assert (await client.generate())["meta_info"]["weight_version"] != "x"

    drive(url, script)


def test_a_push_while_paused_goes_through_and_one_that_would_flush_running_requests_does_not(url: str) -> None:
    async def script(client: Client) -> None:
        payload = {"serialized_named_tensors": [pickle_shared([("model.norm.weight", torch.ones(48))])]}
        for mode in ("in_place", "retract"):
            running = asyncio.create_task(client.generate(LONG))
            while (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
                await asyncio.sleep(0)
            await client.post("/pause_generation", {"mode": mode})
            await client.post("/update_weights_from_tensor", {**payload, "flush_cache": True}, expect=400)
            await client.post("/update_weights_from_tensor", {**payload, "flush_cache": False, "weight_version": mode})
            await client.post("/continue_generation", {})
            assert (await running)["meta_info"]["weight_version"] == mode

    drive(url, script)


def test_a_push_while_running_waits_for_requests_and_holds_newcomers(url: str) -> None:
    async def script(client: Client) -> None:
        before = (await client.get("/model_info"))["weight_version"]
        running = asyncio.create_task(client.generate(LONG))
        while (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
            await asyncio.sleep(0)
        payload = pickle_shared([("model.norm.weight", torch.full((48,), 2.0))])
        body = {"serialized_named_tensors": [payload], "weight_version": "pushed"}
        push = asyncio.create_task(client.post("/update_weights_from_tensor", body))
        await asyncio.sleep(0.02)
        newcomer = asyncio.create_task(client.generate())
        answer = await running
        assert (answer["meta_info"]["weight_version"], len(answer["output_ids"])) == (before, 450)
        await push
        assert (await newcomer)["meta_info"]["weight_version"] == "pushed"

    drive(url, script)


def test_a_stream_does_not_show_the_beginning_of_a_stop_string(url: str) -> None:
    async def script(client: Client) -> None:
        whole = await client.generate()
        stop = whole["text"][2:5]
        parameters = {**GREEDY, "stop": [stop], "skip_special_tokens": False}
        body = {"input_ids": PROMPT, "sampling_params": parameters, "stream": True}
        async with client.session.post(client.base + "/generate", json=body) as response:
            events = (await response.text()).split("\n\n")[:-2]
        texts = [json.loads(event.removeprefix("data: "))["text"] for event in events]
        end = texts[-1]
        assert stop not in end and whole["text"].startswith(end)
        assert all(end.startswith(text) for text in texts)

    drive(url, script)


def test_memory_is_released_and_resumed(url: str) -> None:
    async def script(client: Client) -> None:
        before = await client.generate()
        for tags in ({"tags": ["kv_cache"]}, {"tags": ["weights", "kv_cache"]}, {}):
            await client.post("/release_memory_occupation", tags)
            waiting = asyncio.create_task(client.generate())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await client.post("/resume_memory_occupation", tags)
            assert (await waiting)["output_ids"] == before["output_ids"]

    drive(url, script)


def test_information_endpoints(url: str) -> None:
    async def script(client: Client) -> None:
        paths = (await client.get("/openapi.json"))["paths"]
        assert {"/generate", "/flush_cache", "/v1/chat/completions"} <= paths.keys()
        assert "/begin_weight_update" not in paths
        await client.post("/begin_weight_update", {}, expect=404)
        await client.get("/get_weight_version", expect=404)
        info = await client.get("/get_server_info")
        assert info["internal_states"][0]["memory_usage"]["token_capacity"] == info["max_total_num_tokens"]
        assert (await client.get("/v1/models"))["data"][0]["max_model_len"] == 512
        await client.get("/health_generate")
        await client.post("/update_weight_version", {"new_version": "20"})
        assert (await client.get("/model_info"))["weight_version"] == "20"
        await client.post("/update_weight_version", {"new_version": 20}, expect=400)

    drive(url, script)


def test_openai_endpoints_say_what_generate_says(url: str) -> None:
    async def script(client: Client) -> None:
        same = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "model": "m"}
        whole = await client.post("/generate", {"text": "user:hi;assistant:", "sampling_params": GREEDY})
        completion = await client.post("/v1/completions", {**same, "prompt": "user:hi;assistant:", "logprobs": 2})
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        chat = await client.post("/v1/chat/completions", {**same, "messages": messages, "logprobs": True})
        assert completion["choices"][0]["text"] == whole["text"] == chat["choices"][0]["message"]["content"]
        assert completion["usage"] == chat["usage"]
        assert completion["usage"]["total_tokens"] == whole["meta_info"]["prompt_tokens"] + 6
        values = completion["choices"][0]["logprobs"]["token_logprobs"]
        assert [token["logprob"] for token in chat["choices"][0]["logprobs"]["content"]] == pytest.approx(values)
        contents = {"completions": {"prompt": "user:hi;assistant:"}, "chat/completions": {"messages": messages}}
        for path, content in contents.items():
            body = {**same, **content, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
            async with client.session.post(f"{client.base}/v1/{path}", json=body) as response:
                events = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n")[:-1]]
            assert events.pop() == "[DONE]"
            chunks = [json.loads(event) for event in events]
            assert chunks[-1]["usage"]["completion_tokens"] == 12
            texts = ["", ""]
            for chunk in chunks[:-1]:
                (choice,) = chunk["choices"]
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            assert texts == [whole["text"]] * 2
        await client.post("/v1/chat/completions", {**same, "messages": []}, expect=400)
        await client.post("/v1/completions", {**same, "prompt": ""}, expect=400)
        await client.post("/v1/completions", {**same, "prompt": "a", "max_tokens": 0}, expect=400)

    drive(url, script)


def test_without_a_tokenizer_only_ids_go_in_and_out(model_path: Path) -> None:
    with serving(model_path, "--skip-tokenizer-init", "--served-model-name", "tiny") as address:

        async def script(client: Client) -> None:
            assert "text" not in await client.generate()
            await client.post("/generate", {"text": "a"}, expect=400)
            await client.post("/generate", {"input_ids": [5], "sampling_params": {"stop": ["a"]}}, expect=400)
            assert (await client.get("/v1/models/tiny"))["id"] == "tiny"

        drive(address, script)
