"""The order of one sync: pause, flush, begin, send, end, version, verify, continue. Runs in the driver.

Engines that gave their memory away are paused and flushed already: they take memory for weights before they begin, and
for their KV cache before they continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rlrecipes.errors import WeightSyncError
from rlrecipes.weight_sync.checksums import compare_checksums
from rlrecipes.weight_sync.protocols import Handover, WeightReceiver

Send = Callable[[], Awaitable[dict[str, str]]]
"""Makes every source send everything; returns the trainer's checksums (empty where none were asked for)."""


async def run_sync(
    receivers: Sequence[WeightReceiver],
    send: Send,
    *,
    version: int,
    pause_mode: str,
    should_bracket: bool,
    should_verify: bool,
    timeout_s: float,
    handover: Handover | None = None,
) -> None:
    """Bring every engine to ``version``. On failure engines stay paused: nothing is sampled from half a model.

    Args:
        receivers: every engine of the updated model.
        send: see :data:`Send`.
        version: what follows is stamped with it.
        pause_mode: what happens to running requests: abort or in_place.
        should_bracket: whether the update is opened and closed. Tensors that come in buckets need it, where the server
            has it; it readies weights for loading and finishes them, which reading from disk does by itself.
        should_verify: whether every tensor's checksum is compared.
        timeout_s: longest time of the whole sync.
        handover: of memory that trainer and engines share; None: they share none.

    Raises:
        WeightSyncError: an engine refused, differs, or did not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await _run_in_order(receivers, send, version, pause_mode, should_bracket, should_verify, handover)
    except TimeoutError as error:
        raise WeightSyncError(
            "weight_sync",
            f"version {version} did not reach the engines in {timeout_s:g} s",
            "look at the engines' logs in <run_dir>/logs, or raise weight_sync.timeout_s",
        ) from error


async def _run_in_order(
    receivers: Sequence[WeightReceiver],
    send: Send,
    version: int,
    pause_mode: str,
    should_bracket: bool,
    should_verify: bool,
    handover: Handover | None,
) -> None:
    async def all_do(action: Callable[[WeightReceiver], Coroutine[Any, Any, Any]]) -> list[Any]:
        return list(await asyncio.gather(*(action(receiver) for receiver in receivers)))

    awake = [receiver for receiver in receivers if handover is None or not handover.is_asleep(receiver)]
    await asyncio.gather(*(receiver.pause(pause_mode) for receiver in awake))
    if pause_mode != "in_place":  # requests paused in place still need their cache
        await asyncio.gather(*(receiver.flush_cache() for receiver in awake))
    if handover is not None:
        await handover.before_weights()
    if should_bracket:
        await all_do(lambda receiver: receiver.begin_weight_update())
    expected = await send()
    if should_bracket:
        await all_do(lambda receiver: receiver.end_weight_update())
    await all_do(lambda receiver: receiver.update_weight_version(version))
    if should_verify:
        for receiver, found in zip(receivers, await all_do(lambda r: r.weights_checksum()), strict=True):
            compare_checksums(expected, found, receiver.url)
    if handover is not None:
        await handover.after_weights()
    await all_do(lambda receiver: receiver.continue_generation())
