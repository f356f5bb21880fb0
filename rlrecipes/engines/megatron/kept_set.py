"""Which tokens top_k and top_p leave of a distribution split over ranks. Owns SGLang's rule; refuses logprobs.

SGLang (0.5.17) divides logits by the temperature, takes the softmax, and orders the vocabulary by probability. A token
is kept when fewer than ``top_k`` tokens stand before it **and** the probability of those before it is at most
``top_p``. Both tests read the one softmax over the whole vocabulary: nothing is renormalised between them, so their
order does not matter. The first token is always kept, and so is the one that carries the mass beyond ``top_p``.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor

_ONE_BITS = 0x3F800000
"""Bits of 1.0 as float32. Positive floats are ordered as their bits are: a search over bits ends at the very float."""


@dataclasses.dataclass(frozen=True)
class KeptSet:
    """What is kept of N rows, by the mass ``e^(z - highest z)`` of a token.

    Attributes:
        cut: [N] float32; tokens above it are kept, tokens below it are not.
        share: [N] float32 in [0, 1], of the tokens that have exactly this mass. The engine keeps some of these equals,
            and which ones is chance; each stands here for its share of them, so that the kept mass is the engine's.
        mass: [N] float32, sum of the kept masses over all ranks.
    """

    cut: Tensor
    share: Tensor
    mass: Tensor

    def weigh(self, masses: Tensor) -> Tensor:
        """Weights [N, W] of tokens with these masses: 1 kept, 0 not, ``share`` for equals at the cut."""
        cut, share = self.cut[:, None], self.share[:, None]
        return torch.where(masses == cut, share, (masses > cut).to(masses.dtype))


def find_kept_set(masses: Tensor, totals: Tensor, *, top_k: int, top_p: float, group: dist.ProcessGroup) -> KeptSet:
    """Find the kept tokens of each row.

    Formula, with the masses of the whole vocabulary in descending order ``m_1 >= m_2 >= ...``::

        kept = { i : i <= top_k  and  sum_{j < i} m_j <= top_p * sum_j m_j }

    The cut is found by bisection over floats: 30 passes of counts and sums, which is all that ranks exchange.

    Args:
        masses: [N, W] float32 in [0, 1], this rank's; the largest of a row, over all ranks, is 1.
        totals: [N] float32, sums of the masses over all ranks.
        top_k: at least 1, or -1 to keep all.
        top_p: in (0, 1].
        group: ranks that hold the other parts; all of them call this together.

    Returns:
        The kept set, the same on every rank.

    Source:
        SGLang's top_k_top_p_min_p_sampling_from_probs_torch; flashinfer's joint sampling differs in keeping all equals
        at the cut.
    """
    max_count = float(top_k) if top_k > 0 else math.inf
    max_mass = totals * top_p if top_p < 1 else torch.full_like(totals, math.inf)
    is_over = torch.empty_like(masses)  # compared into float32: several times faster than a bool that is converted
    # The wanted float is the smallest t with fewer than top_k tokens above it, and at most top_p of the mass.
    low = torch.full_like(totals, -1, dtype=torch.int32)  # never satisfied, or below all
    high = torch.full_like(low, _ONE_BITS)  # always satisfied
    for _ in range((_ONE_BITS + 1).bit_length()):
        middle = ((low + high) >> 1).clamp(min=0)
        torch.gt(masses, middle.view(torch.float32)[:, None], out=is_over)
        counts, sums = _reduce(is_over, masses, group)
        is_above = (counts < max_count) & (sums <= max_mass)
        high, low = torch.where(is_above, middle, high), torch.where(is_above, low, middle)
    cut = high.view(torch.float32)
    counts, sums = _reduce(torch.gt(masses, cut[:, None], out=is_over), masses, group)
    equals, _ = _reduce(torch.eq(masses, cut[:, None], out=is_over), masses, group)
    num_kept = torch.minimum(equals, max_count - counts)
    num_kept = torch.minimum(num_kept, torch.floor((max_mass - sums) / cut) + 1)
    return KeptSet(cut, num_kept / equals.clamp(min=1), sums + num_kept * cut)


def _reduce(counted: Tensor, masses: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """How many tokens a row are counted (1, others 0), and their mass; [N] float32 each, over all ranks."""
    found = torch.stack((counted.sum(1), torch.linalg.vecdot(counted, masses)))
    if group.size() > 1:
        dist.all_reduce(found, group=group)
    return found[0], found[1]
