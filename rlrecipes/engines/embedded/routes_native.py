"""SGLang's own endpoints for generating and looking. Owns their handlers; refuses what changes the server."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from rlrecipes.engines.embedded.answers import ApiError, BodyError, to_json, to_native_error
from rlrecipes.engines.embedded.bodies import GenerateBody
from rlrecipes.engines.embedded.server_state import STATE, ServerState

HEALTH_TIMEOUT_S = 20.0
SPOKEN_VERSION = "0.5.17"
"""The SGLang version whose HTTP API this is."""


async def read_body[B: BaseModel](request: web.Request, kind: type[B], default: bytes = b"") -> B:
    """Read a JSON body.

    Args:
        request: with the body.
        kind: what it must be.
        default: used for an empty body.

    Raises:
        BodyError: it is not JSON or does not fit.
    """
    raw = await request.read() or default
    try:
        return kind.model_validate(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        raise BodyError(
            f"1 validation error:\n  {{'type': 'json_invalid', 'msg': 'JSON decode error: {error}'}}"
        ) from None
    except ValidationError as error:
        lines = [
            f"  {{'type': '{e['type']}', 'loc': {('body', *e['loc'])}, 'msg': {e['msg']!r}}}" for e in error.errors()
        ]
        count = len(lines)
        raise BodyError(f"{count} validation error{'s' if count > 1 else ''}:\n" + "\n".join(lines)) from None


async def generate(request: web.Request) -> web.StreamResponse:
    """POST, PUT /generate."""
    state = request.app[STATE]
    body = await read_body(request, GenerateBody)
    if not body.stream:
        try:
            return to_json(await state.frontend.answer(body))
        except ValueError as error:
            return to_native_error(error)
    response = await start_events(request)
    answers = state.frontend.stream(body)
    try:
        async for answer in answers:
            await response.write(b"data: " + orjson.dumps(answer) + b"\n\n")
    except ValueError as error:
        content = {
            "message": str(error),
            "type": "invalid_request_error",
            "code": getattr(error, "status", 400),
            "retryable": False,
        }
        await response.write(b"data: " + orjson.dumps({"error": content}) + b"\n\n")
    finally:
        await answers.aclose()
    await response.write(b"data: [DONE]\n\n")
    return response


async def start_events(request: web.Request) -> web.StreamResponse:
    """Begin a stream of server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def root(request: web.Request) -> web.Response:
    """GET /."""
    return to_json("SGLang is running")


async def ping(request: web.Request) -> web.Response:
    """GET /ping."""
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """GET /health: 503 while generation is paused, as SGLang (which finds out by generating)."""
    return web.Response(status=503 if request.app[STATE].frontend.gate.is_paused else 200)


async def health_generate(request: web.Request) -> web.Response:
    """GET /health_generate: generates one token."""
    frontend = request.app[STATE].frontend
    if frontend.gate.is_paused:
        return web.Response(status=503)
    probe = GenerateBody(input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0})
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await frontend.answer(probe)
    except (TimeoutError, ApiError):
        return web.Response(status=503)
    return web.Response()


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info and /get_model_info."""
    state = request.app[STATE]
    return to_json(
        {
            "model_path": state.model_path,
            "tokenizer_path": str(state.arguments.tokenizer_path),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": state.frontend.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": state.architecture.model_type,
            "architectures": [state.architecture.name],
        }
    )


async def weight_version(request: web.Request) -> web.Response:
    """GET /get_weight_version and /weight_version: gone in SGLang, too."""
    message = "Endpoint '/get_weight_version' or '/weight_version' is deprecated. Please use '/model_info' instead."
    return to_json({"object": "error", "message": message, "type": "404", "param": None, "code": 404}, 404)


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info and /get_server_info."""
    state = request.app[STATE]
    load = await asyncio.wrap_future(state.scheduler.run(state.scheduler.compute_load))
    arguments = state.describe_arguments()
    internal = {
        **arguments,
        "last_gen_throughput": load["gen_throughput"],
        "memory_usage": {
            "weight": round(state.num_weight_bytes / 2**30, 2),
            "kvcache": round(state.num_cache_bytes / 2**30, 2),
            "token_capacity": state.frontend.limits.num_cache_tokens,
        },
    }
    return to_json(
        {
            **arguments,
            "status": "ready",
            "max_total_num_tokens": state.frontend.limits.num_cache_tokens,
            "max_req_input_len": state.frontend.limits.max_prompt_tokens,
            "internal_states": [internal],
            "version": SPOKEN_VERSION,
            "kv_events": None,
        }
    )


async def loads(request: web.Request) -> web.Response:
    """GET /v1/loads."""
    state = request.app[STATE]
    wanted = request.query.get("include", "all").split(",")
    load = await _describe_load(state, "all" in wanted or "memory" in wanted)
    return to_json(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": SPOKEN_VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [load],
        }
    )


async def _describe_load(state: ServerState, has_memory: bool) -> dict[str, Any]:
    load: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": 0,
        **await asyncio.wrap_future(state.scheduler.run(state.scheduler.compute_load)),
        "max_total_num_tokens": state.frontend.limits.num_cache_tokens,
        "max_running_requests": state.arguments.max_running_requests,
    }
    if has_memory:
        load["memory"] = {
            "weight_gb": round(state.num_weight_bytes / 2**30, 3),
            "kv_cache_gb": round(state.num_cache_bytes / 2**30, 3),
            "graph_gb": 0.0,
            "token_capacity": state.frontend.limits.num_cache_tokens,
        }
    return load


async def load(request: web.Request) -> web.Response:
    """GET /get_load: the older shape."""
    described = await _describe_load(request.app[STATE], False)
    return to_json(
        [
            {
                "dp_rank": 0,
                "num_reqs": described["num_running_reqs"] + described["num_waiting_reqs"],
                "num_waiting_reqs": described["num_waiting_reqs"],
                "num_tokens": described["num_total_tokens"],
                "num_pending_tokens": described["num_total_tokens"] - described["num_used_tokens"],
                "ts_tic": time.perf_counter(),
            }
        ]
    )


ROUTES = (
    web.get("/", root),
    web.get("/ping", ping),
    web.get("/health", health),
    web.get("/health_generate", health_generate),
    web.post("/generate", generate),
    web.put("/generate", generate),
    web.get("/model_info", model_info),
    web.get("/get_model_info", model_info),
    web.get("/weight_version", weight_version),
    web.get("/get_weight_version", weight_version),
    web.get("/server_info", server_info),
    web.get("/get_server_info", server_info),
    web.get("/v1/loads", loads),
    web.get("/get_load", load),
)
