"""Whose turn it is on GPUs that trainer and engines share. Owns the order in which memory changes hands.

    engines' turn      engines hold weights and KV cache; the trainer's state lies in the host
    to_trainer         engines pause and give both back; the trainer takes its memory again
    trainer's turn     it computes, and saves
    before_weights     the trainer keeps its weights alone; engines take memory for theirs again
    (weights travel)   two copies of the weights, and nothing else: the least that a sync on the GPU can do with
    after_weights      the trainer's weights go too; engines take memory for their KV cache, and go on

Weights that an engine gave back are undefined until they have travelled, so a turn goes to the engines only through a
weight sync. Engines of models that are not updated keep a copy in the host, which their server puts back.
"""

from __future__ import annotations

import asyncio
import time

from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.errors import EngineError
from rlrecipes.plan.nodes import Plan
from rlrecipes.runner.cluster import TrainerGroup
from rlrecipes.runner.servers import Engine, Serving
from rlrecipes.weight_sync.protocols import WeightReceiver

_WEIGHTS, _CACHE = "weights", "kv_cache"
"""SGLang's names of what an engine gives back."""


class GpuTurns:
    """Trainer and engines in turn; every call does nothing where a recipe lets both stay.

    Begins with the trainer's turn, since nothing has been sent yet.

    Args:
        plan: says who gives its memory back.
        trainers: the ranks.
        serving: the engines; None where nothing is served.
    """

    def __init__(self, plan: Plan, trainers: TrainerGroup, serving: Serving | None) -> None:
        is_shared = serving is not None and plan.shares_gpus
        self._trainers, self._serving = trainers, serving
        self._should_offload_trainer = is_shared and plan.should_offload_trainer
        self._should_offload_engines = is_shared and plan.should_offload_engines
        self._is_trainers_turn = True
        self._asleep: set[EngineClient] = set()
        self._spent_s = 0.0

    @property
    def is_engines_turn(self) -> bool:
        """Whether engines can answer; always, where nothing changes hands."""
        return not (self._is_trainers_turn and (self._should_offload_trainer or self._should_offload_engines))

    def take_spent_s(self) -> float:
        """Seconds that memory took to change hands since this was asked last."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def is_asleep(self, receiver: WeightReceiver) -> bool:
        """Whether an engine is paused and without memory."""
        return receiver in self._asleep

    async def put_engines_to_sleep(self, *, is_last: bool = False) -> None:
        """Have engines on shared GPUs end their requests, pause and give weights and KV cache back.

        Args:
            is_last: as of :meth:`to_trainer`.

        Raises:
            EngineError: one would not.
        """
        if not self._should_offload_engines:
            return
        engines = [engine.client for engine in self._sharing if engine.client not in self._asleep]
        await asyncio.gather(*(_put_to_sleep(client, is_last=is_last) for client in engines))
        self._asleep |= set(engines)

    async def to_trainer(self, *, is_last: bool = False) -> None:
        """Give the trainer its turn, unless it has it.

        Args:
            is_last: nobody asks the engines again: one that does not answer is let be, since what ends the run may have
                ended it too, and a dead one has given its memory back.

        Raises:
            EngineError: an engine would not give its memory back.
            TrainerError: a rank could not take its memory.
        """
        if self._is_trainers_turn:
            return
        started_s = time.monotonic()
        await self.put_engines_to_sleep(is_last=is_last)
        if self._should_offload_trainer:
            await self._trainers.run("reload")
        self._is_trainers_turn = True
        self._spent_s += time.monotonic() - started_s

    async def before_weights(self) -> None:
        """Leave the trainer its weights alone, and give engines memory for theirs."""
        started_s = time.monotonic()
        if self._should_offload_trainer:
            await self._trainers.run("offload_state")
        await self._resume(_WEIGHTS, [engine for engine in self._sharing if engine.is_updated])
        self._spent_s += time.monotonic() - started_s

    async def after_weights(self) -> None:
        """Take the trainer's weights away too, and give engines the rest; the turn is theirs."""
        started_s = time.monotonic()
        if self._should_offload_trainer:
            await self._trainers.run("offload_weights")
        await self._resume(_WEIGHTS, [engine for engine in self._sharing if not engine.is_updated])
        await self._resume(_CACHE, self._sharing)
        frozen = [engine.client for engine in self._sharing if not engine.is_updated and engine.client in self._asleep]
        await asyncio.gather(*(client.continue_generation() for client in frozen))  # the sync continues the others
        self._asleep.clear()
        self._is_trainers_turn = False
        self._spent_s += time.monotonic() - started_s

    @property
    def _sharing(self) -> list[Engine]:
        return self._serving.colocated_engines if self._serving is not None else []

    async def _resume(self, tag: str, engines: list[Engine]) -> None:
        clients = [engine.client for engine in engines if engine.client in self._asleep]
        await asyncio.gather(*(client.resume_memory([tag]) for client in clients))


async def _put_to_sleep(client: EngineClient, *, is_last: bool) -> None:
    try:
        await client.pause("abort")  # a request that comes meanwhile waits, where it would meet memory not there
        await client.release_memory([_WEIGHTS, _CACHE])
    except EngineError:
        if not is_last:
            raise
