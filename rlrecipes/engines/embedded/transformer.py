"""The forward pass over a paged cache. Owns the arithmetic; refuses to choose what runs together.

A step's tokens of all requests are rows of one matrix. Rows of requests that extend by the same number of tokens form
an ``AttentionGroup``: one attention call over their gathered keys and values.

In deterministic mode a row's result must not depend, in any bit, on which rows stand beside it. Matrix products then
run in tiles of a fixed number of rows (math libraries choose another summation order for another shape), elementwise
kernels see a multiple of that number (their scalar tail differs from their vector part), and every token attends as a
batch of its own over a key range that its position alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from rlrecipes.engines.embedded.architecture import Architecture
from rlrecipes.engines.embedded.kv_cache import KVCache
from rlrecipes.engines.embedded.weights import Weights
from rlrecipes.errors import EngineError

TILE_ROWS = 32
"""Rows of a matrix product in deterministic mode."""

KEY_BLOCK = 64
"""Keys that a token attends over are a multiple of it in deterministic mode."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend in one call.

    Attributes:
        rows: their place in the step, B * Q of them, query by query within each request.
        slots: [B, L] int64, the pool slot of every key; 0 pads.
        mask: [B, 1, Q, L] float, 0 where a query sees a key and -inf where not; None where all see all.
        num_queries: Q.
    """

    rows: slice | torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None
    num_queries: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes.

    Attributes:
        token_ids, positions, slots: [T] int64; slots say where each token's keys and values go.
        groups: cover all rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    groups: Sequence[AttentionGroup]


class Transformer:
    """A dense decoder.

    Args:
        weights: read at every step, so an update in place takes effect at the next one.
        cache: where keys and values live.
        is_deterministic: see the module.
        max_positions: rows of the rotary tables.

    Raises:
        EngineError: deterministic, and this machine's math library gives no way to keep rows independent.
    """

    def __init__(self, weights: Weights, cache: KVCache, is_deterministic: bool, max_positions: int) -> None:
        self.architecture = weights.architecture
        self.weights = weights
        self.cache = cache
        self.is_deterministic = is_deterministic
        self._dtype = weights.tensors["model.norm.weight"].dtype
        self._cosines, self._sines = _build_rotary_tables(self.architecture, max_positions, self._dtype)
        self._eps = torch.tensor(self.architecture.norm_eps)
        self._single_row_shapes: set[torch.Size] = set()
        if is_deterministic:
            self._check_row_independence()

    def compute_hidden(self, step: Step) -> torch.Tensor:
        """Run all layers and write every token's keys and values to its slot.

        Returns:
            [T, hidden] before the final norm.
        """
        num_rows = len(step.token_ids)
        token_ids, positions, slots = step.token_ids, step.positions, step.slots
        if self.is_deterministic and num_rows % TILE_ROWS:
            padding = (0, -num_rows % TILE_ROWS)
            token_ids, positions, slots = (functional.pad(row, padding) for row in (token_ids, positions, slots))
        hidden = self.weights.tensors["model.embed_tokens.weight"].index_select(0, token_ids)
        cosines = self._cosines.index_select(0, positions)
        sines = self._sines.index_select(0, positions)
        for layer in range(self.architecture.num_layers):
            hidden = self._run_layer(layer, hidden, (cosines, sines), slots, step.groups)
        return hidden[:num_rows]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Give the float32 logits [N, vocab] of rows of ``compute_hidden``."""
        num_rows = len(hidden)
        if self.is_deterministic and num_rows % TILE_ROWS:
            hidden = functional.pad(hidden, (0, 0, 0, -num_rows % TILE_ROWS))
        tensors = self.weights.tensors
        hidden = self._normalize(hidden, tensors["model.norm.weight"])
        head = "model.embed_tokens.weight" if self.architecture.is_tied else "lm_head.weight"
        return self._multiply(hidden, tensors[head], None)[:num_rows].float()

    def _run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        groups: Sequence[AttentionGroup],
    ) -> torch.Tensor:
        tensors, prefix = self.weights.tensors, f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        normed = self._normalize(hidden, tensors[prefix + "input_layernorm.weight"])
        fused = self._multiply(normed, tensors[attention + "qkv_proj.weight"], tensors.get(attention + "qkv_proj.bias"))
        queries = self._rotate(fused, attention, rotation)
        num_query_columns = self.architecture.num_heads * self.architecture.head_dim
        self.cache.layers[layer].index_copy_(0, slots, fused[:, num_query_columns:])
        mixed = self._attend(layer, queries, groups)
        hidden = hidden + self._multiply(
            mixed, tensors[attention + "o_proj.weight"], tensors.get(attention + "o_proj.bias")
        )
        normed = self._normalize(hidden, tensors[prefix + "post_attention_layernorm.weight"])
        gate_up = self._multiply(normed, tensors[mlp + "gate_up_proj.weight"], tensors.get(mlp + "gate_up_proj.bias"))
        gate, up = gate_up.chunk(2, dim=-1)
        activated = functional.silu(gate).mul_(up)
        return hidden + self._multiply(
            activated, tensors[mlp + "down_proj.weight"], tensors.get(mlp + "down_proj.bias")
        )

    def _rotate(self, fused: torch.Tensor, prefix: str, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Normalise (Qwen3) and rotate queries and keys inside ``fused``; return the queries [T, heads, dim]."""
        a = self.architecture
        num_rotated = a.num_heads + a.num_kv_heads
        heads = fused[:, : num_rotated * a.head_dim].view(-1, num_rotated, a.head_dim)
        rotated = heads
        if a.has_qk_norm:
            tensors = self.weights.tensors
            rotated = self._normalize(heads, None)
            rotated[:, : a.num_heads].mul_(tensors[prefix + "q_norm.weight"])
            rotated[:, a.num_heads :].mul_(tensors[prefix + "k_norm.weight"])
        cosines, sines = rotation
        swapped = torch.cat((rotated[..., a.head_dim // 2 :], rotated[..., : a.head_dim // 2]), dim=-1)
        heads.copy_(torch.addcmul(rotated * cosines, swapped, sines))
        return heads[:, : a.num_heads]

    def _attend(self, layer: int, queries: torch.Tensor, groups: Sequence[AttentionGroup]) -> torch.Tensor:
        """Attend group by group; queries [T, heads, dim] -> [T, heads * dim]."""
        a = self.architecture
        pool = self.cache.layers[layer]
        attend = self._attend_rows if self.is_deterministic else self._attend_group
        if len(groups) == 1 and isinstance(groups[0].rows, slice) and not self.is_deterministic:
            return attend(queries, pool, groups[0])
        mixed = queries.new_zeros(len(queries), a.num_heads * a.head_dim)
        for group in groups:
            mixed[group.rows] = attend(queries[group.rows], pool, group)
        return mixed

    def _attend_group(self, queries: torch.Tensor, pool: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
        a = self.architecture
        batch, length = group.slots.shape
        shared = a.num_heads // a.num_kv_heads
        pairs = pool.index_select(0, group.slots.reshape(-1)).view(batch, length, 2, a.num_kv_heads, a.head_dim)
        keys, values = pairs[:, :, 0].transpose(1, 2), pairs[:, :, 1].transpose(1, 2)
        if group.num_queries == 1:  # query heads that share keys stand in for queries, so nothing is copied for them
            grouped = queries.reshape(batch, a.num_kv_heads, shared, a.head_dim)
            mixed = functional.scaled_dot_product_attention(grouped, keys, values, group.mask)
        else:
            heads = queries.reshape(batch, group.num_queries, a.num_heads, a.head_dim).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(heads, keys, values, group.mask, enable_gqa=shared > 1)
            mixed = mixed.transpose(1, 2)
        return mixed.reshape(batch * group.num_queries, a.num_heads * a.head_dim)

    def _attend_rows(self, queries: torch.Tensor, pool: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
        a = self.architecture
        batch, length = group.slots.shape
        shared = a.num_heads // a.num_kv_heads
        pairs = pool.index_select(0, group.slots.reshape(-1)).view(batch, length, 2, a.num_kv_heads, a.head_dim)
        keys, values = pairs.float().permute(2, 0, 3, 1, 4).reshape(2, batch * a.num_kv_heads, length, a.head_dim)
        grouped = queries.float().reshape(batch * a.num_kv_heads, shared, a.head_dim) * a.head_dim**-0.5
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(batch, a.num_kv_heads, shared, length)
        assert group.mask is not None
        weights = torch.softmax(scores + group.mask, dim=-1).view(batch * a.num_kv_heads, shared, length)
        return torch.bmm(weights, values).view(batch, a.num_heads * a.head_dim).to(queries.dtype)

    def _normalize(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Divide by the root of the mean square over the last axis (Zhang and Sennrich 2019), in float32.

        Fewer and cheaper kernels than torch's own rms_norm, whose parts run one by one on a CPU.
        """
        exact = rows.float()
        norms = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scaled = exact * torch.addcmul(self._eps, norms, norms, value=1.0 / rows.shape[-1]).rsqrt_()
        scaled = scaled.to(rows.dtype)
        return scaled if weight is None else scaled.mul_(weight)

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.is_deterministic:
            return functional.linear(rows, weight, bias)
        tile = 1 if weight.shape in self._single_row_shapes else TILE_ROWS
        if len(rows) == tile:
            return functional.linear(rows, weight, bias)
        return torch.cat([functional.linear(part, weight, bias) for part in torch.split(rows, tile)])

    def _check_row_independence(self) -> None:
        """See for every matrix shape whether all places in a tile give the same bits, and use single rows if not."""
        generator = torch.Generator().manual_seed(0)
        for weight in self.weights.tensors.values():
            if weight.dim() != 2 or weight.shape in self._single_row_shapes:
                continue
            columns = weight.shape[1]
            matrix = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            row = torch.randn(1, columns, generator=generator).to(weight.dtype)
            product = functional.linear(row.expand(TILE_ROWS, columns).contiguous(), matrix)
            if not torch.equal(product, product[:1].expand_as(product)):
                self._single_row_shapes.add(weight.shape)
        a = self.architecture
        shared = a.num_heads // a.num_kv_heads
        left = torch.randn(33, shared, a.head_dim, generator=generator)
        right = torch.randn(33, KEY_BLOCK, a.head_dim, generator=generator).transpose(1, 2)
        if not torch.equal(torch.bmm(left, right)[-1:], torch.bmm(left[-1:], right[-1:])):
            raise EngineError(
                "--enable-deterministic-inference",
                "this machine's math library gives a batched product that depends on the batch",
                "run without the flag, or on another machine",
            )


def _build_rotary_tables(
    architecture: Architecture, max_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [positions, 1, head_dim]; the sign is that of rotate_half."""
    frequencies = torch.tensor(architecture.inverse_frequencies, dtype=torch.float32)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cosines, sines = angles.cos(), angles.sin()
    return (
        torch.cat((cosines, cosines), dim=-1).unsqueeze(1).to(dtype),
        torch.cat((-sines, sines), dim=-1).unsqueeze(1).to(dtype),
    )
