"""What the handlers share. Owns the parts of one running server; refuses to start or stop them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from rlrecipes.engines.embedded.architecture import Architecture
from rlrecipes.engines.embedded.arguments import ServerArguments
from rlrecipes.engines.embedded.frontend import Frontend
from rlrecipes.engines.embedded.scheduler import Scheduler
from rlrecipes.engines.embedded.weight_transfer import UpdateGroups
from rlrecipes.engines.embedded.weights import Weights


@dataclass(slots=True)
class ServerState:
    """The parts of one server.

    Attributes:
        arguments: it was started with.
        architecture: of its model.
        weights: changed only on the scheduler's thread.
        frontend: for requests.
        scheduler: for everything between two steps.
        groups: of distributed weight updates.
        num_cache_bytes: of keys and values.
        model_path: where the weights came from last.
        released_tags: memory that is given back now.
    """

    arguments: ServerArguments
    architecture: Architecture
    weights: Weights
    frontend: Frontend
    scheduler: Scheduler
    groups: UpdateGroups
    num_cache_bytes: int
    model_path: str
    released_tags: set[str] = field(default_factory=set)

    @property
    def num_weight_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.weights.tensors.values())

    def describe_arguments(self) -> dict[str, Any]:
        """Give the arguments as JSON, under SGLang's names."""
        described = {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.arguments).items()
        }
        return described | {
            "model_path": self.model_path,
            "weight_version": self.frontend.weight_version,
            "device": "cpu",
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "disaggregation_mode": "null",
        }


STATE = web.AppKey("state", ServerState)
