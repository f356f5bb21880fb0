"""The parts of a running server, put together. Owns loading the model, limits and routes; refuses the command line."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from aiohttp import web

from rlrecipes.engines.embedded.answers import BodyError, to_json, to_openai_error
from rlrecipes.engines.embedded.architecture import Architecture, read_architecture
from rlrecipes.engines.embedded.arguments import ServerArguments
from rlrecipes.engines.embedded.completion import Stopper
from rlrecipes.engines.embedded.frontend import Frontend, Limits
from rlrecipes.engines.embedded.kv_cache import KVCache
from rlrecipes.engines.embedded.request import Progress
from rlrecipes.engines.embedded.routes_control import ROUTES as CONTROL_ROUTES
from rlrecipes.engines.embedded.routes_native import ROUTES as NATIVE_ROUTES
from rlrecipes.engines.embedded.routes_openai import ROUTES as OPENAI_ROUTES
from rlrecipes.engines.embedded.scheduler import Scheduler
from rlrecipes.engines.embedded.server_state import STATE, ServerState
from rlrecipes.engines.embedded.tokenizer import Tokenizer
from rlrecipes.engines.embedded.transformer import Transformer
from rlrecipes.engines.embedded.weight_transfer import UpdateGroups
from rlrecipes.engines.embedded.weights import Weights
from rlrecipes.errors import EngineError

logger = logging.getLogger(__name__)

DEFAULT_CACHE_BYTES = 1 << 30
MAX_DEFAULT_CACHE_TOKENS = 1 << 18
MAX_BODY_BYTES = 1 << 40
"""Weight updates come as bodies."""


def build_state(arguments: ServerArguments, loop: asyncio.AbstractEventLoop) -> ServerState:
    """Load the model and put the parts together; the scheduler is not started.

    Args:
        arguments: of the command line.
        loop: on which requests live.

    Raises:
        EngineError: the model, its tokenizer or the limits do not work.
    """
    architecture = read_architecture(arguments.model_path)
    tokenizer = None if arguments.skip_tokenizer_init else Tokenizer(arguments.tokenizer_path)
    dtype = _choose_dtype(arguments, architecture)
    weights = Weights(architecture, dtype)
    weights.load_checkpoint(arguments.model_path)
    limits = _choose_limits(arguments, architecture, dtype)
    cache = KVCache(architecture, limits.num_cache_tokens, dtype)
    transformer = Transformer(weights, cache, arguments.enable_deterministic_inference, limits.max_request_tokens + 1)
    end_ids = architecture.eos_token_ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        end_ids |= {tokenizer.eos_token_id}
    frontend = Frontend(arguments, limits, tokenizer, end_ids)

    def tell(news: list[Progress]) -> None:
        loop.call_soon_threadsafe(frontend.hear, news)

    frontend.scheduler = Scheduler(
        transformer,
        Stopper(end_ids, tokenizer.decode if tokenizer is not None else None),
        tell,
        on_failure=lambda error: os._exit(1),  # a server that cannot generate must not look alive
        max_running_requests=arguments.max_running_requests,
        chunk_tokens=arguments.chunked_prefill_size,
        max_request_tokens=limits.max_request_tokens + 1,
    )
    return ServerState(
        arguments, architecture, weights, frontend, frontend.scheduler, UpdateGroups(), cache.num_bytes,
        str(arguments.model_path),
    )  # fmt: skip


def _choose_dtype(arguments: ServerArguments, architecture: Architecture) -> torch.dtype:
    name = architecture.dtype if arguments.dtype == "auto" else arguments.dtype
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _choose_limits(arguments: ServerArguments, architecture: Architecture, dtype: torch.dtype) -> Limits:
    context = architecture.context_length
    if arguments.context_length is not None:
        if arguments.context_length > context:
            raise EngineError(
                "--context-length", f"{arguments.context_length} is longer than the model's {context}", "lower it"
            )
        context = arguments.context_length
    num_tokens = arguments.max_total_tokens
    if num_tokens is None:
        size = torch.empty(0, dtype=dtype).element_size()
        per_token = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * size
        num_tokens = max(context, min(MAX_DEFAULT_CACHE_TOKENS, DEFAULT_CACHE_BYTES // per_token))
    limits = Limits(architecture.vocab_size, context, num_tokens)
    if limits.max_prompt_tokens < 1:
        raise EngineError("--max-total-tokens", f"{num_tokens} tokens hold no request", "raise it")
    return limits


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give every error the shape that SGLang gives it."""
    try:
        return await handler(request)
    except BodyError as error:
        return to_openai_error(str(error), "Bad Request")
    except web.HTTPException as error:
        return to_json({"detail": error.reason}, error.status)
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return web.Response(text="Internal Server Error", status=500)


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: which paths there are."""
    paths: dict[str, dict[str, Any]] = {}
    for route in request.app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
    return to_json({"openapi": "3.1.0", "info": {"title": "rlrecipes embedded engine", "version": "1"}, "paths": paths})


def build_app(state: ServerState) -> web.Application:
    """Put the endpoints around a server's parts."""
    app = web.Application(middlewares=[answer_errors], client_max_size=MAX_BODY_BYTES)
    app[STATE] = state
    app.add_routes([*NATIVE_ROUTES, *CONTROL_ROUTES, *OPENAI_ROUTES, web.get("/openapi.json", openapi)])
    return app


async def run_server(arguments: ServerArguments, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        arguments: of the command line.
        listener: bound, not listening.

    Raises:
        EngineError: the model, its tokenizer or the limits do not work.
    """
    # deterministic mode needs one thread: more would cut elementwise work at places that depend on its size
    is_single = arguments.enable_deterministic_inference
    torch.set_num_threads(1 if is_single else int(os.environ.get("OMP_NUM_THREADS") or 1))
    loop = asyncio.get_running_loop()
    state = build_state(arguments, loop)
    state.scheduler.start()
    should_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, should_stop.set)
    runner = web.AppRunner(build_app(state), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    gc.freeze()  # what is there now stays: a full collection would look through it again and again
    address = listener.getsockname()
    print(f"The server is fired up and ready to roll! http://{address[0]}:{address[1]}", flush=True)
    await should_stop.wait()
    state.scheduler.stop()
    await runner.cleanup()
