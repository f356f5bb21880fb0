import math

import pytest
import torch

from rlrecipes.algos.segments import compute_sample_means, compute_sample_sums
from rlrecipes.errors import ContractError

INDEX = torch.tensor([0, 0, 2, 0, 2, 3])
MASK = torch.tensor([True, True, True, False, False, False])


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
def test_samples_may_interleave_and_be_missing_or_masked(poison):
    values = torch.where(MASK, torch.tensor([1.0, 3.0, 5.0, 0.0, 0.0, 0.0]), poison).requires_grad_()
    named = {"values": values, "loss_mask": MASK, "sample_index": INDEX}
    sums, means = compute_sample_sums(**named), compute_sample_means(**named)
    assert sums.tolist() == [4.0, 4.0, 5.0, 4.0, 5.0, 0.0]
    assert means.tolist() == [2.0, 2.0, 5.0, 2.0, 5.0, 0.0]
    (gradient,) = torch.autograd.grad(means.sum(), values)
    assert gradient.tolist() == [1.5, 1.5, 2.0, 0.0, 0.0, 0.0]


def test_rounding_does_not_grow_with_the_length_of_a_sample():
    values = torch.full((200_000,), 0.1)
    sums = compute_sample_sums(
        values=values,
        loss_mask=torch.ones(200_000, dtype=torch.bool),
        sample_index=torch.zeros(200_000, dtype=torch.int64),
    )
    assert sums.dtype == torch.float64
    assert sums[0].item() == pytest.approx(200_000 * float(values[0]), rel=1e-12)


def test_other_shapes_are_refused():
    with pytest.raises(ContractError, match=r"loss_mask=\[6\], sample_index=\[5\]"):
        compute_sample_sums(values=torch.zeros(6), loss_mask=MASK, sample_index=INDEX[:5])
