"""Causal attention and rotary embedding of packed samples for Megatron's local layers, in torch alone.

Megatron's local core attention refuses ``PackedSeqParams``, and the packed one comes with Transformer Engine, which
needs CUDA. This one gives a CPU, and a GPU without Transformer Engine, the same road: micro-batches without padding
between samples. On a GPU half-precision goes through torch's flash attention over ``cu_seqlens``; everything else is
batched by length here. Neither makes a mask.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlrecipes.engines.megatron.context_parallel import find_positions, find_slots, gather_tokens

_SHORT_TOKENS = 32
"""Samples up to this length share a block whatever their lengths: a block costs more than its padding."""
_LEAST_FILL = 0.75
"""Longer ones share a block while the shortest fills this fraction of the longest."""
_FLASH_WIDTHS = range(8, 257, 8)
"""Head widths of torch's flash attention."""


@dataclass(frozen=True)
class Block:
    """Samples computed together, each padded to the longest.

    A causal query never sees the padding behind it, so right padding needs no mask.

    Attributes:
        num_samples: S.
        length: L, tokens of the longest.
        start: where their tokens start when laid out without padding, block after block.
        num_tokens: N, of theirs.
        padded_from: [S * L], the token of each padded slot (counted from ``start``); None when nothing is padded.
        packed_from: [N], the padded slot of each token.
        padding: the padded slots that hold no token.
    """

    num_samples: int
    length: int
    start: int
    num_tokens: int
    padded_from: Tensor | None
    packed_from: Tensor
    padding: Tensor


@dataclass(frozen=True)
class Layout:
    """How the samples of a micro-batch are computed.

    Attributes:
        blocks: together they hold every token once.
        order: [T], the packed token of each place block after block; None when it is the packed order itself.
        inverse: [T], the other way.
    """

    blocks: tuple[Block, ...]
    order: Tensor | None
    inverse: Tensor


def _build_block(lengths: list[int], start: int, device: torch.device) -> Block:
    sizes = torch.tensor(lengths, device=device)
    longest, total = max(lengths), sum(lengths)
    within = torch.arange(longest, device=device).expand(len(lengths), longest)
    is_token = (within < sizes[:, None]).flatten()
    packed_from = is_token.nonzero().squeeze(1)
    if len(packed_from) == len(lengths) * longest:
        return Block(len(lengths), longest, start, total, None, packed_from, packed_from[:0])
    padded_from = torch.zeros(len(lengths) * longest, dtype=torch.long, device=device)
    padded_from[packed_from] = torch.arange(total, device=device)
    return Block(len(lengths), longest, start, total, padded_from, packed_from, (~is_token).nonzero().squeeze(1))


def _split_by_length(lengths: list[int]) -> list[list[int]]:
    """Sample indices of each block, longest samples first, in order within a block."""
    blocks: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not blocks or (longest > _SHORT_TOKENS and lengths[index] < _LEAST_FILL * longest):
            blocks.append([])
            longest = lengths[index]
        blocks[-1].append(index)
    return [sorted(block) for block in blocks]


@functools.lru_cache(maxsize=8)  # by identity of the tensor: every layer asks for the same one
def build_layout(cu_seqlens: Tensor) -> Layout:
    """Decide how the samples of a micro-batch are computed.

    Args:
        cu_seqlens: [S + 1], where each sample starts, and the end.
    """
    lengths = cu_seqlens.diff().tolist()
    starts = cu_seqlens.tolist()
    groups = _split_by_length(lengths)
    blocks, start = [], 0
    for group in groups:
        blocks.append(_build_block([lengths[index] for index in group], start, cu_seqlens.device))
        start += blocks[-1].num_tokens
    order = torch.cat([torch.arange(starts[i], starts[i + 1]) for group in groups for i in group]).to(cu_seqlens.device)
    is_packed_order = len(groups) == 1
    return Layout(tuple(blocks), None if is_packed_order else order, order.argsort())


class _Gather(torch.autograd.Function):
    """Rows by index, forwards and backwards: autograd's own backward would add row by row.

    ``back[j]`` is where row j went; rows of ``blank`` have no source and pass no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, blank: Tensor | None) -> Tensor:
        """Take ``x[index]``."""
        ctx.save_for_backward(back)
        ctx.blank = blank
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Take ``grad[back]``, with 0 in the rows of ``blank``."""
        (back,) = ctx.saved_tensors
        grad = grads[0].index_select(0, back)
        if ctx.blank is not None:
            grad.index_fill_(0, ctx.blank, 0)
        return grad, None, None, None


def _gather(x: Tensor, index: Tensor, back: Tensor, blank: Tensor | None = None) -> Tensor:
    out: Tensor = _Gather.apply(x, index, back, blank)  # type: ignore[no-untyped-call]
    return out


def _attend(block: Block, scale: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one block; [N, heads or groups, width] in, [N, heads, width] out."""

    def pad(x: Tensor) -> Tensor:
        if block.padded_from is not None:
            x = _gather(x, block.padded_from, block.packed_from)
        return x.view(block.num_samples, block.length, *x.shape[1:]).transpose(1, 2)

    out = torch.nn.functional.scaled_dot_product_attention(
        pad(query), pad(key), pad(value), is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    out = out.transpose(1, 2).reshape(block.num_samples * block.length, *query.shape[1:])
    if block.padded_from is not None:
        out = _gather(out, block.packed_from, block.padded_from, block.padding)
    return out


def compute_packed_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal softmax attention within each sample.

    Args:
        query: [T, heads, width].
        key: [T, groups, width]; heads is a multiple of groups.
        value: [T, groups, width].
        cu_seqlens: [S + 1], where each sample starts; the last is T.
        scale: multiplies the scores before the softmax.

    Returns:
        [T, heads, width].
    """
    layout = build_layout(cu_seqlens)
    if layout.order is not None:
        query, key, value = (_gather(x, layout.order, layout.inverse) for x in (query, key, value))
    parts = [
        _attend(block, scale, *(x.narrow(0, block.start, block.num_tokens) for x in (query, key, value)))
        for block in layout.blocks
    ]
    if layout.order is None:
        return parts[0]
    return _gather(torch.cat(parts), layout.inverse, layout.order)


def compute_flash_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float) -> Tensor:
    """The same by one fused kernel; CUDA, bfloat16 or float16, a width of ``_FLASH_WIDTHS``.

    Args:
        query: [T, heads, width].
        key: [T, groups, width].
        value: [T, groups, width].
        packed: where each sample starts, and the longest.
        scale: multiplies the scores before the softmax.

    Returns:
        [T, heads, width].
    """
    starts, longest, causal = packed.cu_seqlens_q, packed.max_seqlen_q, (-1, 0)  # a window up to the query itself
    out = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scale, window_size=causal)
    assert isinstance(out, Tensor)  # a pair only when more is asked for
    return out


def _has_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in _FLASH_WIDTHS


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of a layer spec; takes what Megatron gives ``DotProductAttention``, with ``PackedSeqParams``.

    Under context parallelism T is this rank's share of the tokens: keys and values are gathered, and the queries of
    other ranks stand as zeros, whose answers nobody reads. That costs CP times the work; the ring is Transformer
    Engine's.
    """

    def __init__(self, config: Any, layer_number: int, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = config.softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> Tensor:
        """Attend within each packed sample.

        Args:
            query: [T, heads of this TP rank, width].
            key: [T, groups of this TP rank, width].
            value: [T, groups of this TP rank, width].
            attention_mask: None; causal within a sample.
            packed_seq_params: ``cu_seqlens_q`` says where each sample starts, over all CP ranks.
            kwargs: Megatron's mask type and bias, which packing decides.

        Returns:
            [T, heads of this TP rank x width].
        """
        starts, group = packed_seq_params.cu_seqlens_q, parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return self._attend(query, key, value, packed_seq_params).flatten(1)
        own = find_slots(starts, group.size(), group.rank(), len(query))
        key, value = gather_tokens(torch.cat((key, value), 1), starts, group).chunk(2, 1)
        query = query.new_zeros(len(key), *query.shape[1:]).index_copy(0, own, query)
        return self._attend(query, key, value, packed_seq_params).index_select(0, own).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        if _has_flash(query):
            return compute_flash_attention(query, key.contiguous(), value.contiguous(), packed, self.scale)
        return compute_packed_attention(query, key, value, packed.cu_seqlens_q, self.scale)


@functools.lru_cache(maxsize=8)
def _build_rotation(
    cu_seqlens: Tensor, freqs: Tensor, cp_size: int, cp_rank: int, num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every token of this rank, [T, 1, width]; position 0 at each sample's start."""
    positions = find_positions(cu_seqlens, cp_size, cp_rank, num_tokens)[1]
    angles = freqs.squeeze(1).index_select(0, positions)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotation of (first half, second half) pairs; its transpose is the rotation by minus the angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Take ``x cos + rotate_half(x) sin``."""
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient back."""
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


def apply_packed_rope(
    x: Tensor, cu_seqlens: Tensor, freqs: Tensor, *, cp_size: int, cp_rank: int, interleaved: bool
) -> Tensor:
    """Rotary embedding of packed samples, under the name and signature of Transformer Engine's fused kernel.

    Formula, for token at position p of its sample::

        x cos(p freqs) + rotate_half(x) sin(p freqs)

    Args:
        x: [T, heads, width].
        cu_seqlens: [S + 1], where each sample starts, over all CP ranks.
        freqs: [longest sample or more, 1, 1, width] angles, both halves alike.
        cp_size: CP; T is a share of the tokens.
        cp_rank: whose share, as context_parallel.py splits them.
        interleaved: False.

    Source:
        Su et al. 2021, arXiv:2104.09864, equation 34, with halves instead of neighbours as pairs.
    """
    if interleaved:
        raise NotImplementedError("packed rotary embedding of local layers: no interleaved pairs")
    cos, sin = _build_rotation(cu_seqlens, freqs, cp_size, cp_rank, len(x), x.dtype)
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def use_packed_rope() -> None:
    """Give Megatron this rotary embedding where it looks for the fused one, for this process.

    The fused one comes with Transformer Engine. The unfused one walks the samples in Python, layer by layer, and asks a
    GPU for their lengths each time.
    """
    rope_utils.fused_apply_rotary_pos_emb_thd = apply_packed_rope
