"""Who may pass while generation is paused or weights change. Owns the waiting; refuses to pause or change anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """Requests pass through it for as long as they run: ``async with gate``. Lives on one event loop.

    While it is paused nobody enters, but those inside stay. A change of weights keeps everybody out and waits for
    those inside, unless generation is paused: then it goes ahead at once.
    """

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._is_changing = False
        self.num_inside = 0
        self.is_paused = False

    async def __aenter__(self) -> None:
        await self._wait_until(lambda: not self.is_paused and not self._is_changing)
        self.num_inside += 1

    async def __aexit__(self, *exception: object) -> None:
        self.num_inside -= 1
        self._wake()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Keep everybody out for as long as the block runs."""
        if self.is_paused:
            yield
            return
        await self._wait_until(lambda: not self._is_changing)
        self._is_changing = True
        try:
            await self._wait_until(lambda: self.num_inside == 0 or self.is_paused)
            yield
        finally:
            self._is_changing = False
            self._wake()

    def set_paused(self, is_paused: bool) -> None:
        """Close or open it for newcomers."""
        self.is_paused = is_paused
        self._wake()

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            woken = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
            await woken

    def _wake(self) -> None:
        """Have everybody who waits look again."""
        waiting, self._waiting = self._waiting, []
        for woken in waiting:
            if not woken.done():
                woken.set_result(None)
