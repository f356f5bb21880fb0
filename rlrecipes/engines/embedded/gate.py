"""Who may pass while generation is paused or weights change. Owns the waiting; refuses to pause or change anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Requests pass through it for as long as they run.

    While it is paused nobody enters, but those inside stay. A change of weights keeps everybody out and waits for
    those inside, unless generation is paused: then it goes ahead at once.
    """

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._is_changing = False
        self.num_inside = 0
        self.is_paused = False

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait to be let in; inside for as long as the block runs."""
        async with self._condition:
            await self._condition.wait_for(lambda: not self.is_paused and not self._is_changing)
            self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
            await asyncio.shield(self._notify())

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Keep everybody out for as long as the block runs."""
        if self.is_paused:
            yield
            return
        async with self._condition:
            await self._condition.wait_for(lambda: not self._is_changing)
            self._is_changing = True
            await self._condition.wait_for(lambda: self.num_inside == 0 or self.is_paused)
        try:
            yield
        finally:
            self._is_changing = False
            await asyncio.shield(self._notify())

    async def set_paused(self, is_paused: bool) -> None:
        """Close or open it for newcomers."""
        self.is_paused = is_paused
        await self._notify()

    async def _notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()
