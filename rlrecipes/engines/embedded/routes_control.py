"""Endpoints that change the server: pausing, aborting, weights, memory. Owns their handlers.

Weights change on the scheduler's thread between two steps. While generation is paused a change happens at once;
otherwise it waits for running requests and holds newcomers back, as SGLang does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from aiohttp import web

from rlrecipes.engines.embedded.answers import BodyError, to_json
from rlrecipes.engines.embedded.architecture import read_architecture
from rlrecipes.engines.embedded.bodies import (
    AbortBody,
    CheckWeightsBody,
    ContinueBody,
    DestroyGroupBody,
    InitGroupBody,
    MemoryBody,
    PauseBody,
    UpdateBody,
    UpdateFromDiskBody,
    UpdateFromDistributedBody,
    UpdateFromTensorBody,
    WeightVersionBody,
)
from rlrecipes.engines.embedded.routes_native import read_body
from rlrecipes.engines.embedded.server_state import STATE, ServerState
from rlrecipes.engines.embedded.weight_transfer import (
    NamedTensors,
    TransferError,
    decode_payload,
    unpickle_tensors,
)
from rlrecipes.engines.embedded.weights import Weights, WeightShapeError
from rlrecipes.errors import EngineError

ABORT_POLL_S = 0.01
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


async def _run[T](state: ServerState, function: Callable[[], T]) -> T:
    return await asyncio.wrap_future(state.scheduler.run(function))


async def flush_cache(request: web.Request) -> web.Response:
    """GET, POST /flush_cache."""
    state = request.app[STATE]
    try:
        timeout_s = float(request.query.get("timeout", 0.0))
    except ValueError:
        raise BodyError("1 validation error:\n  {'type': 'float_parsing', 'loc': ('query', 'timeout')}") from None
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await _run(state, state.scheduler.flush):
        if asyncio.get_running_loop().time() >= deadline:
            message = "Timed out waiting for idle state." if timeout_s else "Flush cache failed.\n"
            return web.Response(text=message, status=400)
        await asyncio.sleep(ABORT_POLL_S)
    if timeout_s:  # whom it waited for is answered first
        await asyncio.sleep(ABORT_POLL_S)
    return web.Response(text=FLUSHED)


async def abort_request(request: web.Request) -> web.Response:
    """POST /abort_request."""
    body = await read_body(request, AbortBody)
    if body.abort_all or body.rid:
        request.app[STATE].frontend.abort(body.rid or "", body.abort_all)
    return web.Response()


async def pause_generation(request: web.Request) -> web.Response:
    """POST /pause_generation."""
    state = request.app[STATE]
    body = await read_body(request, PauseBody)
    state.frontend.gate.set_paused(True)
    if body.mode == "abort":
        while state.frontend.gate.num_inside:
            state.frontend.abort("", True)
            await asyncio.sleep(ABORT_POLL_S)
    else:
        await _run(state, lambda: state.scheduler.pause(is_retracting=body.mode == "retract"))
    return to_json({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(request: web.Request) -> web.Response:
    """POST /continue_generation."""
    state = request.app[STATE]
    await read_body(request, ContinueBody)
    await _run(state, state.scheduler.resume)
    state.frontend.gate.set_paused(False)
    return to_json({"message": "Generation continued successfully.", "status": "ok"})


async def update_weights_from_disk(request: web.Request) -> web.Response:
    """POST /update_weights_from_disk."""
    state = request.app[STATE]
    body = await read_body(request, UpdateFromDiskBody)

    async def load() -> NamedTensors:
        return await asyncio.to_thread(_load_from_disk, state, Path(body.model_path))

    success, message = await _update(state, body, load, "Succeeded to update model weights.")
    if success:
        state.model_path = body.model_path
    return to_json({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)


def _load_from_disk(state: ServerState, model_path: Path) -> NamedTensors:
    """Read a whole checkpoint apart, so that a bad one leaves the running weights as they are."""
    try:
        architecture = read_architecture(model_path)
        if Weights(architecture, torch.float32).shapes != state.weights.shapes:
            raise TransferError(f"Failed to update weights: {model_path} holds a model of another shape.")
        loaded = Weights(state.architecture, next(iter(state.weights.tensors.values())).dtype)
        loaded.load_checkpoint(model_path)
    except EngineError as error:
        raise TransferError(f"Failed to get weights iterator: {error}") from error
    return list(loaded.tensors.items())


async def update_weights_from_tensor(request: web.Request) -> web.Response:
    """POST /update_weights_from_tensor."""
    state = request.app[STATE]
    body = await read_body(request, UpdateFromTensorBody)
    try:
        payloads = [decode_payload(text) for text in body.serialized_named_tensors]
    except ValueError as error:
        raise BodyError(
            f"1 validation error:\n  {{'loc': ('body', 'serialized_named_tensors'), 'msg': '{error}'}}"
        ) from None

    async def unpickle() -> NamedTensors:
        if not payloads:
            raise TransferError("serialized_named_tensors is empty; send one payload for each tensor-parallel rank")
        return unpickle_tensors(payloads[0], body.load_format)

    success, message = await _update(state, body, unpickle, "Success")
    return to_json({"success": success, "message": message}, 200 if success else 400)


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """POST /update_weights_from_distributed."""
    state = request.app[STATE]
    body = await read_body(request, UpdateFromDistributedBody)

    async def receive() -> NamedTensors:
        return await asyncio.to_thread(
            state.groups.receive, body.names, body.dtypes, body.shapes, body.group_name, body.load_format
        )

    success, message = await _update(state, body, receive, "Succeeded to update parameter online.")
    return to_json({"success": success, "message": message}, 200 if success else 400)


async def _update(
    state: ServerState, body: UpdateBody, get_tensors: Callable[[], Awaitable[NamedTensors]], done: str
) -> tuple[bool, str]:
    """Get tensors, write them between two steps and count the version up."""
    if body.abort_all_requests:
        state.frontend.abort("", True)
    try:
        async with state.frontend.gate.changing():
            tensors = await get_tensors()
            await _run(state, lambda: _write(state, tensors, body.flush_cache))
    except (TransferError, WeightShapeError) as error:
        return False, str(error)
    if body.weight_version is None:
        return True, done
    state.frontend.weight_version = body.weight_version
    return True, f"{done} Weight version updated to {body.weight_version}."


def _write(state: ServerState, tensors: NamedTensors, should_flush: bool) -> None:
    for name, tensor in tensors:  # all or nothing
        state.weights.find_target(name, tensor.shape)
    if should_flush and not state.scheduler.flush():
        raise TransferError(
            "Cache flush failed: requests are running or waiting. Send flush_cache=false, or pause with mode abort."
        )
    with torch.no_grad():
        state.weights.update(tensors)


async def init_weights_update_group(request: web.Request) -> web.Response:
    """POST /init_weights_update_group: answers when all ranks have met."""
    body = await read_body(request, InitGroupBody)
    try:
        await asyncio.to_thread(
            request.app[STATE].groups.join,
            body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name, body.backend,
        )  # fmt: skip
    except TransferError as error:
        return to_json({"success": False, "message": str(error)}, 400)
    return to_json({"success": True, "message": "Succeeded to initialize custom process group."})


async def destroy_weights_update_group(request: web.Request) -> web.Response:
    """POST /destroy_weights_update_group."""
    body = await read_body(request, DestroyGroupBody)
    try:
        await asyncio.to_thread(request.app[STATE].groups.leave, body.group_name)
    except TransferError as error:
        return to_json({"success": False, "message": str(error)}, 400)
    return to_json({"success": True, "message": "Succeeded to destroy custom process group."})


async def update_weight_version(request: web.Request) -> web.Response:
    """POST /update_weight_version."""
    body = await read_body(request, WeightVersionBody)
    frontend = request.app[STATE].frontend
    if body.abort_all_requests:
        frontend.abort("", True)
    frontend.weight_version = body.new_version
    message = f"Weight version updated to {body.new_version}"
    return to_json({"success": True, "message": message, "new_version": body.new_version})


async def weights_checker(request: web.Request) -> web.Response:
    """GET, POST /weights_checker: a checksum of every tensor."""
    state = request.app[STATE]
    body = await read_body(request, CheckWeightsBody, default=b"{}")
    if body.action != "checksum":
        return to_json({"success": False, "message": f"Unsupported action={body.action!r}"}, 400)
    checksums = await _run(state, state.weights.compute_checksums)
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(name.encode() + checksums[name].encode())
    overall = digest.hexdigest()
    ranks = ("tp", "dp", "pp")
    parallelism = {f"{kind}_rank": 0 for kind in ranks} | {f"{kind}_size": 1 for kind in ranks} | {"rank": 0, "size": 1}
    rank = {"checksums": checksums, "per_gpu_checksum": overall, "parallelism_info": parallelism}
    engine_checksum = hashlib.sha256(overall.encode()).hexdigest()
    return to_json({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": engine_checksum})


async def release_memory_occupation(request: web.Request) -> web.Response:
    """GET, POST /release_memory_occupation: gives keys and values back; weights stay, a CPU has nowhere to put them."""
    state = request.app[STATE]
    body = await read_body(request, MemoryBody, default=b"{}")
    tags = _to_tags(body)

    def release() -> bool:
        if not state.scheduler.is_idle:
            return False
        if "kv_cache" in tags:
            state.scheduler.flush()
            state.scheduler.release_cache_memory()
        return True

    if not await _run(state, release):
        return _to_memory_error("release_memory_occupation should be called only when server is idle.")
    state.released_tags |= tags
    return to_json(None)


async def resume_memory_occupation(request: web.Request) -> web.Response:
    """GET, POST /resume_memory_occupation."""
    state = request.app[STATE]
    body = await read_body(request, MemoryBody, default=b"{}")
    tags = _to_tags(body)
    if not tags <= state.released_tags:
        return _to_memory_error(f"not released: {sorted(tags - state.released_tags)}")
    state.released_tags -= tags
    if "kv_cache" in tags:
        await _run(state, state.scheduler.resume_cache_memory)
    return to_json(None)


def _to_tags(body: MemoryBody) -> set[str]:
    return set(body.tags or MEMORY_TAGS)


def _to_memory_error(message: str) -> web.Response:
    return to_json({"error": {"message": message}}, 400)


ROUTES = (
    web.get("/flush_cache", flush_cache),
    web.post("/flush_cache", flush_cache),
    web.post("/abort_request", abort_request),
    web.post("/pause_generation", pause_generation),
    web.post("/continue_generation", continue_generation),
    web.post("/update_weights_from_disk", update_weights_from_disk),
    web.post("/update_weights_from_tensor", update_weights_from_tensor),
    web.post("/update_weights_from_distributed", update_weights_from_distributed),
    web.post("/init_weights_update_group", init_weights_update_group),
    web.post("/destroy_weights_update_group", destroy_weights_update_group),
    web.post("/update_weight_version", update_weight_version),
    web.get("/weights_checker", weights_checker),
    web.post("/weights_checker", weights_checker),
    web.get("/release_memory_occupation", release_memory_occupation),
    web.post("/release_memory_occupation", release_memory_occupation),
    web.get("/resume_memory_occupation", resume_memory_occupation),
    web.post("/resume_memory_occupation", resume_memory_occupation),
)
