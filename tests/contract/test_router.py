"""The real router in front of two engines, started as the Plan starts it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_servers import Server, start_server
from tiny_model import Reference

from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.engines.sglang.process import ServerProcess, find_free_port, wait_until_workers
from rlrecipes.engines.sglang.serving import ServingClient
from rlrecipes.errors import EngineError
from rlrecipes.types import Completion, SamplingParams

pytestmark = pytest.mark.xdist_group("serving")
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def engines(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    log_dir = tmp_path_factory.mktemp("engines")
    started = [start_server("embedded", reference.path, log_dir, f"engine-{index}") for index in range(2)]
    for engine in started:
        asyncio.run(engine.process.wait_until_ready(engine.url, _TIMEOUT_S))
    yield started
    for engine in started:
        engine.process.stop()


def start_router(engines: list[Server], log_path: Path, policy: str) -> Server:
    port = find_free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", policy, "--worker-urls", *(engine.url for engine in engines)]
    command += [
        "--request-timeout-secs",
        "600",
        "--disable-retries",
        "--disable-circuit-breaker",
        "--log-level",
        "warn",
    ]
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
    command += ["--health-failure-threshold", "2", "--health-success-threshold", "1"]
    # It always serves metrics; by default on one fixed port, where a second router dies.
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(find_free_port())]
    process = ServerProcess("router", command, dict(os.environ), log_path)
    return Server("router", f"http://127.0.0.1:{port}", process)


@pytest.fixture(scope="module", params=["round_robin", "manual"])
def router(
    request: pytest.FixtureRequest, engines: list[Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = start_router(engines, tmp_path_factory.mktemp("router") / "router.log", request.param)
    asyncio.run(server.process.wait_until_ready(server.url, _TIMEOUT_S))
    asyncio.run(wait_until_workers(server.url, [engine.url for engine in engines], _TIMEOUT_S))
    yield server
    server.process.stop()


async def generate(url: str, prompts: list[list[int]], keys: list[str | None]) -> list[Completion]:
    async with ServingClient(url, timeout_s=60, max_connections=64) as client:
        requests = (
            client.generate(input_ids=prompt, sampling=GREEDY, request_id=f"r{index}", routing_key=key)
            for index, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        )
        return await asyncio.gather(*requests)


async def mark(engines: list[Server]) -> None:
    """Give each engine a weight version of its own, by which its answers are known."""
    for index, engine in enumerate(engines):
        await EngineClient(engine.url).update_weight_version(index + 1)


@pytest.mark.parametrize("router", ["round_robin"], indirect=True)
def test_requests_are_spread_and_answered_as_by_an_engine(
    router: Server, engines: list[Server], reference: Reference
) -> None:
    asyncio.run(mark(engines))
    prompts = [reference.encode(f"request {index}") for index in range(32)]
    answers = asyncio.run(generate(router.url, prompts, [None] * 32))
    assert Counter(answer.weight_version for answer in answers) == {1: 16, 2: 16}
    for prompt, answer in zip(prompts[:4], answers[:4], strict=True):
        assert list(answer.token_ids) == reference.greedy(prompt, 12)
        assert answer.num_prompt_tokens == len(prompt) and answer.finish_reason == "length"


@pytest.mark.parametrize("router", ["manual"], indirect=True)
def test_a_routing_key_stays_with_one_engine(router: Server, engines: list[Server], reference: Reference) -> None:
    asyncio.run(mark(engines))
    keys = [f"group {index % 32}" for index in range(64)]  # few would all fall to one engine now and then
    answers = [*asyncio.run(generate(router.url, [reference.prompt] * 64, [*keys]))]
    answers += asyncio.run(generate(router.url, [reference.prompt] * 64, [*keys]))
    engine_of = {(key, answer.weight_version) for key, answer in zip([*keys, *keys], answers, strict=True)}
    assert len(engine_of) == 32 and {version for _, version in engine_of} == {1, 2}


@pytest.mark.parametrize("router", ["manual"], indirect=True)
def test_workers_are_listed_and_a_stranger_is_missed(router: Server, engines: list[Server]) -> None:
    workers = router.ok("/workers")["workers"]
    assert {worker["url"] for worker in workers} == {engine.url for engine in engines}
    assert all(worker["is_healthy"] and worker["worker_type"] == "regular" for worker in workers)
    stranger = f"http://127.0.0.1:{find_free_port()}"
    with pytest.raises(EngineError, match=f"did not find these engines healthy within 0.3 s: {stranger}"):
        asyncio.run(wait_until_workers(router.url, [engines[0].url, stranger], 0.3))


def test_a_dead_engine_costs_no_later_request(
    engines: list[Server], reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log_dir = tmp_path_factory.mktemp("dying")
    doomed = start_server("embedded", reference.path, log_dir, "doomed")
    asyncio.run(doomed.process.wait_until_ready(doomed.url, _TIMEOUT_S))
    router = start_router([engines[0], doomed], log_dir / "router.log", "manual")
    try:
        asyncio.run(router.process.wait_until_ready(router.url, _TIMEOUT_S))
        asyncio.run(wait_until_workers(router.url, [engines[0].url, doomed.url], _TIMEOUT_S))
        keys: list[str | None] = [f"group {index}" for index in range(16)]
        asyncio.run(generate(router.url, [reference.prompt] * 16, keys))
        doomed.process.stop(0.0)
        # The router answers 500 to those whose key points to it; the client asks again until the router knows.
        answers = asyncio.run(generate(router.url, [reference.prompt] * 16, keys))
        assert {answer.token_ids for answer in answers} == {tuple(reference.greedy(reference.prompt, 12))}
    finally:
        router.process.stop(0.0)
