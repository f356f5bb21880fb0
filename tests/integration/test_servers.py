"""Routers and engines of a Plan, without a run around them: what stands in routers.json, and what is told."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.engines.sglang.process import ServerProcess, find_free_port
from rlrecipes.errors import EngineError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.servers import Serving
from tests.integration.test_topologies import engine_of_others, write_model

pytestmark = pytest.mark.timeout(300)
POLICY = "topology.served_models.policy"


def resolve_words(tmp_path, *words):
    recipe = compose([f"runs_dir={tmp_path}", "name=run", "topology.device=cpu", *words])
    host = HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34)
    return resolve(recipe.config, (host,), recipe.origins, recipe.problems)


def serve(plan, told=None):
    """Bring everything up, look, take it down."""

    async def run():
        serving = Serving(plan, (told if told is not None else []).append)
        try:
            serving.launch()
            await serving.wait_until_ready()
            return [engine.url for engine in serving.policy_engines]
        finally:
            await serving.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    with engine_of_others(write_model(root / "model", 1), "/") as url:
        yield url


def test_an_engine_of_others_is_met(tmp_path, engine):
    plan = resolve_words(tmp_path, "topology=external", f"{POLICY}.server_groups.main.urls=[{engine}]")
    assert serve(plan) == [engine]


def test_a_url_where_nobody_is_is_told(tmp_path):
    url = f"http://127.0.0.1:{find_free_port()}"
    plan = resolve_words(tmp_path, "topology=external", f"{POLICY}.server_groups.main.urls=[{url}]")
    with pytest.raises(EngineError) as caught:
        serve(plan)
    (problem,) = caught.value.problems
    assert problem.where == f"engine {url}"
    assert "could not be reached" in problem.problem
    assert problem.fix == "start it, or name another url: it is one of those that others run"


def test_an_engine_that_does_something_else_is_told(tmp_path, engine):
    prefill, decode = f"{POLICY}.server_groups.main", f"{POLICY}.server_groups.decode"
    words = [f"{prefill}.urls=[{engine}]", f"{prefill}.worker_type=prefill", f"+server_group@{decode}=external"]
    plan = resolve_words(
        tmp_path, "topology=external", *words, f"{decode}.urls=[http://127.0.0.1:9]", f"{decode}.worker_type=decode"
    )
    with pytest.raises(EngineError, match="is a regular worker; the recipe says prefill"):
        serve(plan)


def test_a_router_to_which_nobody_comes_is_told(tmp_path):
    told = []
    plan = resolve_words(tmp_path, "topology=router_only", f"{POLICY}.join_timeout_s=2")
    with pytest.raises(EngineError, match="0 of 1 engines joined within 2 s"):
        serve(plan, told)
    (line,) = told
    assert line.startswith("policy: waiting 2 s for 1 engines to join; register each: POST http://127.0.0.1:")
    assert not (tmp_path / "run" / "routers.json").exists()


def test_where_the_routers_are_stands_in_a_file(tmp_path, engine):
    plan = resolve_words(tmp_path, "topology=external", f"{POLICY}.server_groups.main.urls=[{engine}]")

    async def run():
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "routers.json").write_text('{"policy": "http://of-a-run-that-was-killed"}')
        serving = Serving(plan, print)
        try:
            serving.launch()
            assert not (tmp_path / "run" / "routers.json").exists()
            await serving.wait_until_ready()
            return json.loads((tmp_path / "run" / "routers.json").read_text()), serving.router_url("policy")
        finally:
            await serving.close()

    urls, url = asyncio.run(run())
    assert urls == {"policy": url}


def test_the_file_tells_no_router_that_does_not_answer_yet(tmp_path, engine, monkeypatch):
    """One router is up long before the other."""
    mirror = "topology.served_models.mirror"
    words = [f"+served_model@{mirror}=policy", f"+server_group@{mirror}.server_groups.main=external"]
    again = engine.replace("127.0.0.1", "localhost")  # one engine will do
    words += [f"{mirror}.server_groups.main.urls=[{again}]", f"{POLICY}.server_groups.main.urls=[{engine}]"]
    plan = resolve_words(tmp_path, "topology=external", *words)
    file, told = tmp_path / "run" / "routers.json", []
    wait = ServerProcess.wait_until_ready

    async def wait_in_turn(process, url, timeout_s):
        while process.name.startswith("policy") and not file.exists():
            await asyncio.sleep(0.01)
        if process.name.startswith("policy"):
            told.append(json.loads(file.read_text()))
        await wait(process, url, timeout_s)

    monkeypatch.setattr(ServerProcess, "wait_until_ready", wait_in_turn)
    serve(plan)
    assert [list(urls) for urls in told] == [["mirror"]]
