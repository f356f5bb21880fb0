"""The GPU's kernels, run by Triton's interpreter on a CPU, against the torch version of the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

CASES = {
    "float32": ("float32", 37, 48, 1.0),
    "bfloat16": ("bfloat16", 37, 48, 0.7),
    "several blocks": ("float32", 9000, 9008, 1.3),
    "whole width": ("bfloat16", 4096, 4096, 1.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_pass_gives_what_many_do(case: tuple[Any, ...]) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, *map(str, case)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(dtype: str, width: int, num_columns: int, temperature: float) -> None:
    import torch

    from rlrecipes.engines.megatron import logprobs, vocabulary_kernels

    torch.manual_seed(0)
    num_rows, scale = 5, 1 / temperature
    logits = (3 * torch.randn(num_rows, num_columns)).to(getattr(torch, dtype))
    logits[:, width:] = 1e4  # what stands in the padding does not matter
    logits[0, :width] = -50.0  # and then the highest comes last
    logits[0, width - 1] = 60.0
    targets = torch.randint(0, width, (num_rows,))
    targets[1] = width - 1
    is_local = torch.tensor([True, True, True, False, True])
    shard = logprobs._Shard(torch.where(is_local, targets, 0), is_local, width, scale, 1.0, -1, None)  # type: ignore
    highest, expected = logprobs._compute_local_sums(logits[:, :width], shard)
    found_highest, found = vocabulary_kernels.compute_row_sums(
        logits[:, :width], shard.targets, width=width, scale=scale
    )
    found[2].masked_fill_(~is_local, 0)
    torch.testing.assert_close(found_highest, highest, atol=0, rtol=0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    mass, moment, _ = expected
    entropy = mass.log() - moment / mass
    upstream = torch.randn(2, num_rows)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for grads in ((upstream[0], None), (None, upstream[1]), (upstream[0], upstream[1])):
        context = Saved(shard, logits, highest, mass, entropy)
        wanted, _ = logprobs._VocabularyLogprobs.backward(context, *grads)
        ours = vocabulary_kernels.compute_logits_gradient(
            logits, torch.where(is_local, targets, -1), (highest, mass, entropy), grads, width=width, scale=scale
        )
        assert ours.dtype == logits.dtype and ours[:, width:].count_nonzero() == 0 and ours.count_nonzero()
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)


class Saved:
    """What autograd keeps between forward and backward."""

    def __init__(self, shard: Any, *tensors: Any) -> None:
        self.shard, self.saved_tensors = shard, tensors


if __name__ == "__main__":
    name, *sizes, heat = sys.argv[1:]
    compare(name, *map(int, sizes), float(heat))
