"""The value model of PPO: the policy's layers with a scalar head. Owns the head and what is read from it.

It lives in the policy's processes and layout, with gradients, optimizer and schedule of its own. Its weights are in the
trainer's checkpoint under ``critic.`` and nowhere else: no engine serves it and no HF architecture has such a head.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn

from rlrecipes.engines.megatron.configuration import build_transformer_config
from rlrecipes.engines.megatron.forward import Batch, Inputs
from rlrecipes.engines.megatron.model import build_model
from rlrecipes.engines.megatron.trained_model import TrainedModel
from rlrecipes.engines.megatron.weights import WeightMap
from rlrecipes.plan.nodes import CriticNode, ModelNode, TrainerNode

_INITIAL_VALUE_STD = 0.1
_HEAD = "output_layer.weight"


class ValueHead(nn.Module):
    """A value for every hidden state: ``hidden_states @ weight.T``, in float32 whatever the model's precision.

    Stands where GPTModel has its output layer and is called like it. It has no bias: the hidden states come out of a
    norm with weights of its own, from which a constant can be learned. Every TP rank holds all of it; the weight is
    drawn from a generator of its own, normal with deviation 0.1 / sqrt(hidden_size): hidden states of unit size then
    get values of about 0.1, at any width and layout.

    Under sequence parallelism a TP rank sees its share of the tokens. It computes their values and gathers these,
    where gathering hidden states would move hidden_size times as much.

    Args:
        hidden_size: width of the hidden states.
        seed: of the initial weight.
        is_sequence_parallel: whether hidden states are split over TP by tokens.
        device: where the weight lives.
    """

    def __init__(self, hidden_size: int, seed: int, is_sequence_parallel: bool, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} value_head".encode()))
        weight = torch.randn(1, hidden_size, generator=generator) * (_INITIAL_VALUE_STD / math.sqrt(hidden_size))
        self.weight = nn.Parameter(weight.to(device))
        self._is_sequence_parallel = is_sequence_parallel

    def forward(self, hidden_states: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        """Values of hidden states.

        Args:
            hidden_states: [N, 1, hidden_size], or this TP rank's share of N.
            weight: a tied embedding, which a critic does not have.

        Returns:
            [N, 1, 1] float32, the same on every TP rank, and no bias.
        """
        own = self.weight
        if self._is_sequence_parallel:  # backward sums the shares' gradients, in float32 beside a bfloat16 model's
            own = tensor_parallel.copy_to_tensor_model_parallel_region(own)
        values = nn.functional.linear(hidden_states.float(), own)
        if self._is_sequence_parallel:  # every TP rank computes the same loss: backward takes its own share of it
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


@dataclass(frozen=True)
class ValueReader:
    """Reads values from what the head gives on the last stage."""

    def read(self, inputs: Inputs, out: Tensor) -> tuple[Batch, Tensor]:
        """The batch, and values of the states in which ``target_ids`` were chosen, [T], 0 where nothing is trained."""
        return inputs.batch, torch.where(inputs.batch["loss_mask"], inputs.spread(out.squeeze(1)), 0.0)


def build_critic(model: ModelNode, trainer: TrainerNode, critic: CriticNode) -> TrainedModel:
    """Build this rank's part of the critic: head drawn, layers still undefined.

    Args:
        model: the policy, whose shapes and precision the layers have.
        trainer: layout, device and seed.
        critic: optimizer and schedule.
    """
    # Untied: the embedding is not the head, so the last stage holds no copy of it.
    shapes = model.shapes.model_copy(update={"untie_embeddings_and_output_weights": True})
    chunks = build_model(model.model_copy(update={"shapes": shapes}), trainer, build_transformer_config(model, trainer))
    if chunks[-1].post_process:
        head = ValueHead(shapes.hidden_size, trainer.seed, trainer.sequence_parallel, trainer.device)
        chunks[-1].output_layer = head
    weights = WeightMap(chunks, shapes, parallel_state.get_tensor_model_parallel_group(), elsewhere=frozenset({_HEAD}))
    return TrainedModel(
        chunks,
        weights,
        trainer,
        critic.optim,
        critic.num_train_steps_total,
        where="trainer.critic_step",
        section="algo.critic.optim",
    )
