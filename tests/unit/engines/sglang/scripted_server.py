"""A server of a few lines, which answers as it is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rlrecipes.engines.sglang.process import find_free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def with_server(handler: Handler, use: Callable[[str], Awaitable[Any]]) -> Any:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    port = find_free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        return await use(f"http://127.0.0.1:{port}")
    finally:
        await runner.cleanup()
