"""The two HTTP clients: one to generate, through the router, and one to steer a single engine.

Owns endpoints, bodies and what an answer must hold. Refuses processes (process.py) and what weights are sent when
(weight_sync). Works with every server that speaks SGLang's API; what a server lacks is asked, never guessed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_fixed,
    wait_random_exponential,
)

from rlrecipes.engines.sglang.http import JSON_HEADERS, refuse, request, to_message
from rlrecipes.errors import EngineError, RunError, WeightSyncError
from rlrecipes.types import FINISH_ABORT, Completion, SamplingParams

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
UNVERSIONED = "default"
"""SGLang's weight version of weights it loaded at start; counted as version 0."""
_STATUS_ABORTED_IN_QUEUE = 499
_STATUSES_TO_RETRY = (502, 503)
_LOST_ENGINE = b"error sending request for url"
"""The router says so, with status 500, when the engine it chose does not take the request or dies over it."""
_RETRY_S = 60.0
"""How long an unreachable server is asked again: the router needs seconds to notice a dead worker or a new one."""
_FIX = "look at the engine's and the router's log in <run_dir>/logs"


class _UnavailableError(Exception):
    """Nothing was generated, and asking again may help."""


class ServingClient:
    """The way to all engines of one model: their router, or one engine itself.

    Use as ``async with ServingClient(url, timeout_s=600, max_connections=256) as client``.

    Args:
        base_url: of the router or engine, ``http://host:port``.
        timeout_s: longest time of one request, waiting for a connection included.
        max_connections: most requests in flight; further ones wait here.
    """

    def __init__(self, base_url: str, *, timeout_s: float, max_connections: int) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers=JSON_HEADERS,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        *,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        routing_key: str | None = None,
    ) -> Completion:
        """Generate one answer.

        A server that cannot be reached, or says 502 or 503, or a router that lost the engine, is asked again for a
        bounded time, under a request id of its own each time: the one before may still be running.

        Args:
            input_ids: the prompt.
            sampling: how to sample.
            request_id: names the request in the engine's logs and in ``EngineClient.abort_request``.
            routing_key: requests with the same key go to one engine, where the router's policy can.

        Returns:
            The answer. One that was aborted has what was generated until then, which may be nothing (then its
            weight version is -1).

        Raises:
            EngineError: no engine answered in time, or one refused, or its answer is not whole.
        """
        started = time.perf_counter()
        body = {"input_ids": input_ids, "sampling_params": _to_json(sampling), "return_logprob": True}
        headers = {ROUTING_KEY_HEADER: routing_key} if routing_key is not None else None
        try:
            status, content = await self._post(body | {"rid": request_id}, headers)
        except _UnavailableError:
            status, content = await self._post_again(body, request_id, headers)
        if status == _STATUS_ABORTED_IN_QUEUE:
            return Completion((), (), FINISH_ABORT, -1, len(input_ids), 0, time.perf_counter() - started)
        if status != 200:
            raise self._error(f"answered {status}: {to_message(content)}")
        return self._to_completion(content, time.perf_counter() - started)

    async def _post(self, body: dict[str, Any], headers: dict[str, str] | None) -> tuple[int, bytes]:
        if self._session is None:
            raise self._error("was called outside of `async with`")
        try:
            async with self._session.post(
                self._base_url + "/generate", data=orjson.dumps(body), headers=headers
            ) as response:
                status, content = response.status, await response.read()
        except TimeoutError as error:
            raise self._error(f"had no answer within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _UnavailableError(f"could not be reached: {error or type(error).__name__}") from error
        if status in _STATUSES_TO_RETRY or (status == 500 and _LOST_ENGINE in content):
            raise _UnavailableError(f"answered {status}: {to_message(content)}")
        return status, content

    async def _post_again(
        self, body: dict[str, Any], request_id: str, headers: dict[str, str] | None
    ) -> tuple[int, bytes]:
        def give_up(state: RetryCallState) -> tuple[int, bytes]:
            problem = state.outcome.exception() if state.outcome else None
            raise self._error(f"{problem} (asked {state.attempt_number + 1} times in {_RETRY_S:g} s)")

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_UnavailableError),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            stop=stop_after_delay(min(_RETRY_S, self._timeout_s)),
            retry_error_callback=give_up,
        )
        attempts = iter(range(1, 1_000_000))

        # A lambda would not do: tenacity awaits only what is a coroutine function.
        async def post() -> tuple[int, bytes]:
            return await self._post(body | {"rid": f"{request_id}.{next(attempts)}"}, headers)

        return await retrying(post)

    def _to_completion(self, content: bytes, duration_s: float) -> Completion:
        try:
            answer = orjson.loads(content)
            meta = answer["meta_info"]
            token_ids = tuple(answer["output_ids"])
            finish = meta["finish_reason"]["type"]
            entries = meta.get("output_token_logprobs")
            if entries is None and finish == FINISH_ABORT:  # aborted while it waited: the engine kept no logprobs
                token_ids, entries = (), ()
            logprobs = tuple([entry[0] for entry in entries])
            version = meta["weight_version"]
            # A sum is finite exactly when all its terms are, and a missing term is a TypeError.
            if tuple([entry[1] for entry in entries]) != token_ids or not math.isfinite(sum(logprobs)):
                raise ValueError("token ids and log probabilities do not match")
            return Completion(
                token_ids=token_ids,
                rollout_logprobs=logprobs,
                finish_reason=finish,
                weight_version=0 if version == UNVERSIONED else int(version),
                num_prompt_tokens=meta["prompt_tokens"],
                num_cached_tokens=meta.get("cached_tokens") or 0,
                duration_s=duration_s,
            )
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error(f"gave an answer that cannot be read ({error!r}): {content[:300]!r}") from error

    def _error(self, problem: str) -> EngineError:
        return EngineError(f"engine {self._base_url}", f"/generate {problem}", _FIX)


def _to_json(sampling: SamplingParams) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_new_tokens": sampling.min_new_tokens,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is doing, over its data-parallel ranks.

    Attributes:
        num_running_requests: in the batch.
        num_waiting_requests: queued.
        kv_cache_use_fraction: share of the KV cache's token slots that requests or the prefix cache hold.
    """

    num_running_requests: int
    num_waiting_requests: int
    kv_cache_use_fraction: float


class _BusyError(Exception):
    """The engine still runs requests."""


class EngineClient:
    """Steers one engine. Holds no connection, so it works in any process and any event loop.

    Every call raises EngineError, or WeightSyncError when it is about weights, naming the engine, the call and what
    the server said.

    Args:
        url: of the engine, ``http://host:port``.
        timeout_s: longest time of one call; a weight update is one.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._paths: frozenset[str] | None = None

    async def close(self) -> None:
        """Nothing is held between calls."""

    async def health(self) -> bool:
        """Whether the server answers and generates; False while paused, where the server says so."""
        return await self._is_ok("/health")

    async def health_generate(self) -> bool:
        """Whether the server has just generated a token."""
        return await self._is_ok("/health_generate")

    async def server_info(self) -> dict[str, Any]:
        """The server's arguments and state."""
        return await self._call("GET", "/server_info")

    async def model_info(self) -> dict[str, Any]:
        """Path, architecture and weight version of the served model."""
        return await self._call("GET", "/model_info")

    async def weight_version(self) -> int:
        """Version stamped on what is generated now; 0 for weights loaded at start."""
        version = (await self.model_info())["weight_version"]
        return 0 if version == UNVERSIONED else int(version)

    async def paths(self) -> frozenset[str]:
        """Endpoints the server has, by its own description; asked once."""
        if self._paths is None:
            self._paths = frozenset((await self._call("GET", "/openapi.json"))["paths"])
        return self._paths

    async def load(self) -> EngineLoad:
        """How busy the engine is."""
        ranks = (await self._call("GET", "/v1/loads?include=core"))["loads"]
        num_slots = sum(rank["max_total_num_tokens"] for rank in ranks)
        return EngineLoad(
            sum(rank["num_running_reqs"] for rank in ranks),
            sum(rank["num_waiting_reqs"] for rank in ranks),
            sum(rank["num_used_tokens"] for rank in ranks) / max(num_slots, 1),
        )

    async def pause(self, mode: str) -> None:
        """Stop generating; new requests wait.

        Args:
            mode: of running requests: ``abort`` ends them with what they have, ``retract`` puts them back into the
                queue, to be computed anew, ``in_place`` keeps them with their cache.
        """
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Generate again."""
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self, *, timeout_s: float = 10.0) -> None:
        """Forget the prefix cache. SGLang refuses while a request runs or waits, paused or not.

        Args:
            timeout_s: how long to wait for the last request to end.
        """

        async def flush() -> None:
            status, content = await self._ask("POST", "/flush_cache", {})
            if status == 400:
                raise _BusyError(to_message(content))
            if status != 200:
                raise refuse(self.url, "/flush_cache", status, content)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_BusyError),
            wait=wait_fixed(0.05),
            stop=stop_after_delay(timeout_s),
            reraise=True,
        )
        try:
            await retrying(flush)
        except _BusyError as error:
            problem = f"/flush_cache was refused for {timeout_s:g} s because requests run or wait: {error}"
            raise EngineError(
                f"engine {self.url}", problem, "pause with mode abort, or let the requests end"
            ) from error

    async def abort_request(self, request_id: str | None = None) -> None:
        """End one request, or all; a request unknown to the engine is no error.

        Args:
            request_id: as given to ``generate``; None ends all. Requests whose id begins with it end as well.
        """
        body = {"abort_all": True} if request_id is None else {"rid": request_id}
        await self._call("POST", "/abort_request", body)

    async def begin_weight_update(self) -> None:
        """Open an update, where the server has that endpoint."""
        await self._call_if_known("/begin_weight_update")

    async def end_weight_update(self) -> None:
        """Close it, where the server has that endpoint."""
        await self._call_if_known("/end_weight_update")

    async def update_weights_from_tensor(self, payloads: Sequence[str], *, load_format: str | None = None) -> None:
        """Take tensors from shared memory, without flushing the prefix cache.

        Args:
            payloads: one per tensor-parallel rank: base64 of a ForkingPickler's list of (name, tensor).
            load_format: ``flattened_bucket`` when a payload holds one flat tensor and its description.
        """
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": False}
        await self._update("/update_weights_from_tensor", body)

    async def update_weights_from_disk(self, path: str) -> None:
        """Read an HF directory, which the engine must see under the same path, without flushing the prefix cache.

        Args:
            path: of the directory.
        """
        # SGLang's scheduler dies when it is to flush in the same call and is not quite idle yet.
        await self._update("/update_weights_from_disk", {"model_path": path, "flush_cache": False})

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group; collective with its other members.

        Args:
            address: of rank 0.
            port: of rank 0's store.
            rank_offset: the group's rank of the engine's first rank.
            world_size: of the group.
            group_name: of the group.
            backend: ``gloo`` or ``nccl``.
        """
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset}
        body |= {"world_size": world_size, "group_name": group_name, "backend": backend}
        await self._update("/init_weights_update_group", body)

    async def update_weights_from_distributed(
        self, *, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group_name: str
    ) -> None:
        """Receive one broadcast per tensor from the group's rank 0, without flushing the prefix cache.

        SGLang's scheduler dies when the group is unknown to it: join first.

        Args:
            names: HF names.
            dtypes: torch's names, without ``torch.``.
            shapes: of the tensors.
            group_name: as joined.
        """
        body = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        await self._update("/update_weights_from_distributed", body | {"group_name": group_name, "flush_cache": False})

    async def destroy_weights_update_group(self, *, group_name: str) -> None:
        """Leave the group.

        Args:
            group_name: as joined.
        """
        await self._update("/destroy_weights_update_group", {"group_name": group_name})

    async def update_weight_version(self, version: int) -> None:
        """Stamp what is generated from now on; running requests go on.

        Args:
            version: the new one.
        """
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._update("/update_weight_version", body)

    async def weights_checksum(self) -> dict[str, str]:
        """Hash of every tensor of tensor-parallel rank 0, under the engine's own (fused) names."""
        answer = await self._update("/weights_checker", {"action": "checksum"})
        checksums: dict[str, str] = answer["ranks"][0]["checksums"]
        return checksums

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give GPU memory back; the prefix cache is forgotten, and the engine unusable until ``resume_memory``.

        Args:
            tags: of ``weights``, ``kv_cache``, ``cuda_graph``.
        """
        # SGLang's scheduler dies when it is not idle, which it is a moment after its last answer; a flush waits for it.
        await self.flush_cache()
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take it again. Weights that were released are undefined until the next update.

        Args:
            tags: as released.
        """
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def _call_if_known(self, path: str) -> None:
        if path in await self.paths():
            await self._update(path, {})

    async def _update(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._call("POST", path, body, WeightSyncError)
        if not answer.get("success", True):
            raise refuse(self.url, path, 200, orjson.dumps(answer), WeightSyncError)
        return answer

    async def _call(
        self, method: str, path: str, body: object = None, error_type: type[RunError] = EngineError
    ) -> dict[str, Any]:
        status, content = await self._ask(method, path, body, error_type)
        if status != 200:
            raise refuse(self.url, path, status, content, error_type)
        try:
            answer = orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise refuse(self.url, path, status, content, error_type) from error
        return answer if isinstance(answer, dict) else {}

    async def _ask(
        self, method: str, path: str, body: object, error_type: type[RunError] = EngineError
    ) -> tuple[int, bytes]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s)) as session:
            return await request(session, method, self.url, path, body, error_type=error_type)

    async def _is_ok(self, path: str) -> bool:
        try:
            status, _ = await self._ask("GET", path, None)
        except EngineError:
            return False
        return status == 200
