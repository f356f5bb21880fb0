"""What the client of one engine makes of answers, good and bad."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from scripted_server import Handler, with_server

from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.errors import EngineError, WeightSyncError


def test_calls_that_fail_name_engine_and_call() -> None:
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/update_weights_from_disk":
            return web.json_response({"success": False, "message": "no such directory"})
        return web.Response(status=500, text="broken")

    async def use(url: str) -> None:
        engine = EngineClient(url)
        with pytest.raises(WeightSyncError, match=f"{url}.*update_weights_from_disk answered 200: no such directory"):
            await engine.update_weights_from_disk("/x")
        with pytest.raises(WeightSyncError, match="weights_checker answered 500: broken"):
            await engine.weights_checksum()
        with pytest.raises(EngineError, match="pause_generation answered 500: broken"):
            await engine.pause("abort")
        assert not await engine.health()
        gone = EngineClient(f"http://127.0.0.1:{find_free_port()}")
        with pytest.raises(EngineError, match="/server_info could not be reached"):
            await gone.server_info()
        assert not await gone.health()

    asyncio.run(with_server(handler, use))


def test_begin_and_end_are_called_where_the_server_has_them() -> None:
    called: list[str] = []

    def serve(paths: list[str]) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            called.append(request.path)
            return web.json_response({"paths": dict.fromkeys(paths), "success": True})

        return handler

    async def use(url: str) -> None:
        engine = EngineClient(url)
        await engine.begin_weight_update()
        await engine.end_weight_update()

    asyncio.run(with_server(serve(["/generate"]), use))
    assert called == ["/openapi.json"]  # asked once
    called.clear()
    asyncio.run(with_server(serve(["/begin_weight_update", "/end_weight_update"]), use))
    assert called == ["/openapi.json", "/begin_weight_update", "/end_weight_update"]
