"""How fast ranks of a group exchange bytes, by where they lie. Owns the choice between NVLink and network."""

from __future__ import annotations

from collections.abc import Sequence

from rlrecipes.plan.nodes import DeviceNode
from rlrecipes.plan.step_inputs import StepInputs
from rlrecipes.plan.time_constants import TimeConstants


def compute_link_bytes_per_s(
    inputs: StepInputs,
    constants: TimeConstants,
    num_ranks_per_node: int,
    *,
    is_spread: bool,
    fraction: float | None = None,
) -> float:
    """What one rank of a group sends or receives, one direction.

    Within a node: NVLink. Across nodes: the network cards of the group's ranks on one node together, but never more
    than NVLink, over which the bytes reach them.

    Args:
        inputs: of the step.
        constants: of the model.
        num_ranks_per_node: of the group; its network cards work together.
        is_spread: whether the group lies on several nodes.
        fraction: of a link's bandwidth that is reached; None: the link's own.
    """
    nvlink = inputs.gpu.nvlink_bytes_per_s * (fraction or constants.nvlink_fraction)
    if not is_spread:
        return nvlink
    return min(nvlink, num_ranks_per_node * inputs.nic_bytes_per_s * (fraction or constants.nic_fraction))


def compute_spread(devices: Sequence[DeviceNode], size: int, stride: int) -> tuple[bool, int]:
    """Whether any group of trainer ranks crosses nodes, and how many of its ranks share one.

    Args:
        devices: in rank order; nodes rise with the rank.
        size: ranks of a group.
        stride: from one to the next.

    Returns:
        Whether one does; ranks on the first node of the first group.
    """
    span = stride * (size - 1)
    nodes = [device.node for device in devices]
    block = stride * size
    starts = (start + offset for start in range(0, len(nodes), block) for offset in range(stride))
    is_spread = any(nodes[start] != nodes[start + span] for start in starts)
    together = sum(nodes[index * stride] == nodes[0] for index in range(size))
    return is_spread, together
