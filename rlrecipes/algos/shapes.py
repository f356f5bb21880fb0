"""The shape check that opens public functions of this room. Owns its message; refuses to broadcast or repair."""

from __future__ import annotations

from torch import Tensor

from rlrecipes.errors import ContractError


def check_same_shape(function: str, **tensors: Tensor) -> None:
    """Refuse tensors that torch would broadcast or that cannot be combined.

    Args:
        function: name of the caller, for the message.
        tensors: by argument name.

    Raises:
        ContractError: two of them differ in shape.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        raise ContractError(
            f"algos.{function}",
            "shapes differ: " + ", ".join(f"{name}={list(tensor.shape)}" for name, tensor in tensors.items()),
            "give one entry per token (or per rollout) in each of them",
        )
