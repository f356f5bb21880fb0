"""The HTTP client that steers a single engine.

Owns endpoints, bodies and what an answer must hold. Refuses to generate (serving.py), processes (process.py) and what
weights are sent when (weight_sync). Works with every server that speaks SGLang's API; what a server lacks is asked,
never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from rlrecipes.engines.sglang.http import refuse, request, to_message, to_weight_version
from rlrecipes.errors import EngineError, RunError, WeightSyncError


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
        return to_weight_version((await self.model_info())["weight_version"])

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
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str,
    ) -> None:
        """Receive tensors from the group's rank 0, without flushing the prefix cache.

        SGLang's scheduler dies when the group is unknown to it: join first.

        Args:
            names: HF names.
            dtypes: torch's names, without ``torch.``.
            shapes: of the tensors.
            group_name: as joined.
            load_format: ``flattened_bucket``: one broadcast of all their bytes.
        """
        body: dict[str, object] = {"names": list(names), "dtypes": list(dtypes), "group_name": group_name}
        body |= {"shapes": [list(shape) for shape in shapes], "load_format": load_format, "flush_cache": False}
        await self._update("/update_weights_from_distributed", body)

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
