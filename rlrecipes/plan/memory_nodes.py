"""What a Plan predicts of its GPUs' memory. Read by people, rules and search; no part of a run or of the hash."""

from __future__ import annotations

from typing import Literal

from rlrecipes.config.schema import Section

type Phase = Literal["init", "rollout", "logprobs", "train", "update", "weight_sync"]
PHASES: tuple[Phase, ...] = ("init", "rollout", "logprobs", "train", "update", "weight_sync")
"""init: everything is built; Adam's moments come with the first update. rollout: engines answer. logprobs: the trainer
reads old, reference and teacher logprobs. train: forward and backward. update: the optimizer's. weight_sync: weights
travel."""


class GpuRoleNode(Section):
    """GPUs that hold the same processes, by the fullest of them."""

    name: str
    """trainer, <served model>/<group>, or both joined by a plus where they share GPUs."""
    num_gpus: int
    stage: int | None
    """Pipeline stage of the trainer rank that is told of, the fullest; None without a trainer."""
    parts: dict[str, dict[str, int]]
    """phase -> part -> bytes; parts of a trainer start ``trainer.``, of an engine ``engine.``."""
    host_bytes: int
    """What these processes keep in the host's memory, for each GPU: frozen weights, offloaded state."""

    def sum_phase(self, phase: str) -> int:
        """Bytes of one phase.

        Args:
            phase: one of :data:`PHASES`.
        """
        return sum(self.parts[phase].values())

    @property
    def fullest_phase(self) -> str:
        """The phase that needs most."""
        return max(self.parts, key=self.sum_phase)

    @property
    def peak_bytes(self) -> int:
        """What it needs."""
        return max(map(self.sum_phase, self.parts))


class EngineRoomNode(Section):
    """What one engine of a group can hold."""

    name: str
    """<served model>/<group>."""
    kv_bytes_per_token: int
    """On one GPU."""
    capacity_tokens: int
    """Of one engine's KV cache; 0: its weights leave no room."""
    max_longest_rollouts: int
    """Rollouts of the recipe's longest length at once."""


class HostMemoryNode(Section):
    """What a machine keeps in its own memory for the GPUs on it, from the first turn to the end of the run."""

    memory_bytes: int
    """What it has."""
    parts: dict[str, int]
    """part -> bytes, named like those of a GPU: ``trainer.optimizer``, ``trainer.offloaded`` (state that waits while
    engines work), ``trainer.frozen_weights``, ``engine.weights``."""

    @property
    def needed_bytes(self) -> int:
        """All parts."""
        return sum(self.parts.values())


class MemoryNode(Section):
    """Memory of every kind of GPU in every phase, and what more would fit."""

    gpu_bytes: int
    """What a process can have of one GPU."""
    usable_bytes: int
    """Of these, what the model allows to be used; the rest is for what it does not know."""
    roles: tuple[GpuRoleNode, ...]
    engines: tuple[EngineRoomNode, ...]
    max_tokens_per_micro_batch: int
    """The largest parallel.max_tokens_per_micro_batch that fits; 0: none does."""
    max_sample_tokens: int
    """The longest sample that trainer and engines can hold."""
    hosts: tuple[HostMemoryNode, ...] = ()
    """The machines that trainer and engines lie on, in order."""

    @property
    def headroom_bytes(self) -> int:
        """What the fullest GPU leaves of ``usable_bytes``; negative where something does not fit."""
        return self.usable_bytes - max(role.peak_bytes for role in self.roles)

    @property
    def is_fitting(self) -> bool:
        """Whether every phase fits, every engine holds one longest rollout, and machines have room for what waits."""
        return (
            self.headroom_bytes >= 0
            and all(engine.max_longest_rollouts >= 1 for engine in self.engines)
            and self.are_hosts_fitting
        )

    @property
    def are_hosts_fitting(self) -> bool:
        """Whether every machine has room for what it keeps."""
        return all(host.needed_bytes <= host.memory_bytes for host in self.hosts)
