"""A sync against a server whose updates are sessions, as SGLang's are since 0.5.23: a few lines with its rules."""

from __future__ import annotations

import asyncio

import pytest
import torch
from aiohttp import web

from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.errors import WeightSyncError
from rlrecipes.weight_sync.buckets import to_buckets
from rlrecipes.weight_sync.session import run_sync
from rlrecipes.weight_sync.transports import Destination, TensorTransport

PATHS = [
    "/pause_generation",
    "/flush_cache",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/end_weight_update",
    "/update_weight_version",
    "/continue_generation",
]
TENSORS = [("a", torch.ones(4)), ("b", torch.ones(4))]


class SessionServer:
    """Refuses buckets outside of a session, a session within one, and what it is told to refuse."""

    def __init__(self, refused=""):
        self.calls, self.is_open, self.refused = [], False, refused

    async def answer(self, request):
        if request.path == "/openapi.json":
            return web.json_response({"paths": dict.fromkeys(PATHS, {})})
        self.calls.append((request.path, await request.json()))
        problem = self._follow(request.path)
        if request.path == self.refused or problem:
            return web.json_response({"success": False, "message": problem or "out of order today"}, status=400)
        return web.json_response({"success": True, "message": "Success"})

    def _follow(self, path):
        needed = {"/begin_weight_update": False, "/update_weights_from_tensor": True, "/end_weight_update": True}
        if path in needed and needed[path] != self.is_open:
            return f"{path}: a session is {'open' if self.is_open else 'not open'}"
        self.is_open = path == "/begin_weight_update" or (self.is_open and path != "/end_weight_update")
        return ""


def sync(servers, *, from_disk=False, num_syncs=1):
    async def run():
        runners, urls = [], []
        for server in servers:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", server.answer)
            runners.append(web.AppRunner(app, shutdown_timeout=0.1))
            await runners[-1].setup()
            port = find_free_port()
            await web.TCPSite(runners[-1], "127.0.0.1", port).start()
            urls.append(f"http://127.0.0.1:{port}")
        clients = [EngineClient(url, timeout_s=10) for url in urls]
        sender = TensorTransport([Destination(EngineClient(url, timeout_s=10), 1) for url in urls])

        async def send():
            if from_disk:
                await asyncio.gather(*(client.update_weights_from_disk("/weights") for client in clients))
                return {}
            for bucket in to_buckets(iter(TENSORS), bucket_bytes=16):
                await sender.send(bucket)
            return {}

        options = {"pause_mode": "abort", "should_bracket": not from_disk, "should_verify": False, "timeout_s": 10}
        try:
            await sender.connect()
            for version in range(1, num_syncs + 1):
                await run_sync(clients, send, version=version, **options)
        finally:
            for runner in runners:
                await runner.cleanup()

    asyncio.run(run())


def paths_of(server):
    return [path for path, _ in server.calls]


ORDER = [
    "/pause_generation",
    "/flush_cache",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/update_weight_version",
    "/continue_generation",
]


def test_buckets_come_between_begin_and_end_every_time():
    servers = [SessionServer(), SessionServer()]
    sync(servers, num_syncs=2)
    for server in servers:
        assert paths_of(server) == 2 * ORDER
        bodies = [body for path, body in server.calls if path in ("/begin_weight_update", "/end_weight_update")]
        assert bodies == 4 * [{}]  # every default: all of the model, base weights, nothing discarded
        assert [body["new_version"] for path, body in server.calls if path == ORDER[-2]] == ["1", "2"]


def test_weights_from_disk_need_no_session():
    server = SessionServer()
    sync([server], from_disk=True)
    expected = [path for path in ORDER if path not in ("/begin_weight_update", "/end_weight_update")]
    expected[2:4] = ["/update_weights_from_disk"]
    assert paths_of(server) == expected


@pytest.mark.parametrize("refused", ORDER[2:4] + ORDER[5:7])
def test_a_refusal_in_between_is_told_and_nothing_goes_on(refused):
    servers = [SessionServer(), SessionServer(refused)]
    with pytest.raises(WeightSyncError, match=f"{refused} answered 400: out of order today"):
        sync(servers)
    for server in servers:
        assert "/continue_generation" not in paths_of(server)
    after = ORDER[ORDER.index(refused) + 1 :]
    assert not [path for path in paths_of(servers[1]) if path in after and path != refused]
