"""The loss and gradient of a train step do not depend on how its samples are packed, split, ordered or spread.

A small differentiable policy stands in for the transformer: it sees the running mean of a sample's token embeddings,
so whatever leaks between packed samples, or any shift by one, changes the numbers. The reference below computes the
same step rollout by rollout and token by token, without weights, masks or packing.
"""

import math
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.objective import compute_policy_objective, compute_sft_objective
from rlrecipes.batching.grid import build_grid
from rlrecipes.types import Sample

VOCABULARY, WIDTH = 7, 4
OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "kl_coef_in_loss": 0.3, "entropy_coef": 0.05}
POLICY = partial(compute_policy_objective, kl_estimator="k3", **OPTIONS)
MODES = st.sampled_from(["per_sequence", "per_rollout", "per_prompt", "per_token", "constant"])
DIVISOR = 8.0
OBJECTIVES = st.sampled_from([POLICY, compute_sft_objective])
LAYOUTS = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 4),
        "max_tokens": st.integers(12, 60),
        "pad_to_multiple": st.sampled_from([1, 3, 8]),
        "num_micro_batches_multiple": st.integers(1, 2),
    }
)


@st.composite
def train_steps(draw):
    """Samples of groups of unequal size; rollouts with one or several samples; some masked in part or fully."""
    samples = []
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    for prompt_index, group in enumerate(
        draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3))
    ):
        for sibling, num_samples in enumerate(group):
            for _ in range(num_samples):
                loss_mask = [False, *draw(st.lists(st.booleans(), max_size=7))]
                samples.append(make_sample(generator, loss_mask, prompt_index, sibling))
    return samples or [make_sample(generator, [False, True], 0, 0)]


def make_sample(generator, loss_mask, prompt_index, sibling):
    def random(low, high):
        # Rounded to what a MicroBatch holds, so that reference and road start from the same numbers.
        return generator.uniform(low, high, len(loss_mask)).astype(np.float32)

    return Sample(
        token_ids=tuple(generator.integers(0, VOCABULARY, len(loss_mask)).tolist()),
        loss_mask=tuple(loss_mask),
        rollout_logprobs=tuple(random(-3, -1).tolist()),
        prompt_index=prompt_index,
        sibling=sibling,
        old_logprobs=random(-3, -1),
        ref_logprobs=random(-3, -1),
        advantages=random(-2, 2),
    )


def make_parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(VOCABULARY, WIDTH), (WIDTH, VOCABULARY)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def run_policy(parameters, token_ids, boundaries):
    """[T, V] log of the next token's distribution, each sample on its own."""
    embeddings, output = parameters
    means = []
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        sums = embeddings[token_ids[start:end]].cumsum(0)
        means.append(sums / torch.arange(1, end - start + 1).unsqueeze(1))
    return (torch.cat(means).tanh() @ output).log_softmax(-1)


def run_step(samples, mode, objective, poison=0.0, dtype=torch.float64, **layout):
    """Loss and gradients of one train step over a grid, as trainer ranks add them up."""
    weights = compute_loss_weights(
        mode=mode,
        loss_masks=[torch.tensor(sample.loss_mask) for sample in samples],
        rollout_ids=[(sample.prompt_index, sample.sibling) for sample in samples],
        prompt_ids=[sample.prompt_index for sample in samples],
        divisor=DIVISOR,
    )
    weighted = [replace(s, loss_weights=w.numpy()) for s, w in zip(samples, weights, strict=True)]
    parameters = make_parameters(dtype)
    total = 0.0
    for micro_batch in [micro_batch for row in build_grid(weighted, **layout) for micro_batch in row]:
        arrays = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
        batch = {name: torch.tensor(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
        batch |= {n: t.to(dtype) for n, t in batch.items() if t.is_floating_point()}
        loss_weights = batch.pop("loss_weights")
        floats = {name: tensor for name, tensor in batch.items() if tensor.is_floating_point()}
        batch |= {name: torch.where(batch["loss_mask"], tensor, tensor + poison) for name, tensor in floats.items()}
        logprobs = run_policy(parameters, batch["token_ids"], micro_batch.cu_seqlens)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        target_logprobs = logprobs.gather(1, batch["target_ids"].unsqueeze(1)).squeeze(1)
        token_losses, metrics = objective(batch, target_logprobs, entropy)
        assert all(metric.isfinite().all() for metric in metrics.values())
        loss = (token_losses * loss_weights).sum()
        loss.backward()
        total += float(loss.detach())
    return total, [parameter.grad for parameter in parameters]


def slow_token_loss(objective, parameters, sample, place):
    """The loss of one token, from its own prefix and plain arithmetic."""
    embeddings, output = parameters
    prefix = embeddings[list(sample.token_ids[:place])].mean(0)
    distribution = (prefix.tanh() @ output).log_softmax(-1)
    logprob = distribution[sample.token_ids[place]]
    if objective is compute_sft_objective:
        return -logprob
    ratio = (logprob - float(sample.old_logprobs[place])).exp()
    advantage = float(sample.advantages[place])
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    if advantage < 0:
        surrogate = surrogate.clamp(min=3.0 * advantage)
    gap = float(sample.ref_logprobs[place]) - logprob
    return -surrogate + 0.3 * (gap.exp() - 1 - gap) + 0.05 * (distribution.exp() * distribution).sum()


def slow_step(samples, mode, objective):
    """Loss and gradients of one train step, straight from the definition."""
    parameters = make_parameters()
    losses = {}
    for index, sample in enumerate(samples):
        unit = {
            "per_sequence": index,
            "per_prompt": sample.prompt_index,
            "per_token": "all",
        }.get(mode, (sample.prompt_index, sample.sibling))
        trained = [place for place, is_trained in enumerate(sample.loss_mask) if is_trained]
        losses.setdefault(unit, []).extend(slow_token_loss(objective, parameters, sample, place) for place in trained)
    total = 0.0 * sum(parameter.sum() for parameter in parameters)
    for unit_losses in losses.values():
        denominator = DIVISOR if mode == "constant" else max(len(unit_losses), 1)
        total = total + sum(unit_losses) / denominator / len(losses)
    total.backward()
    return float(total.detach()), [parameter.grad for parameter in parameters]


def assert_same(got, expected, tolerance=1e-6):
    assert math.isclose(got[0], expected[0], rel_tol=tolerance, abs_tol=tolerance)
    for gradient, expected_gradient in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance)


@settings(max_examples=150, deadline=None)
@given(samples=train_steps(), mode=MODES, objective=OBJECTIVES, layout=LAYOUTS)
def test_any_layout_gives_the_loss_of_the_definition(samples, mode, objective, layout):
    assert_same(run_step(samples, mode, objective, **layout), slow_step(samples, mode, objective))


@settings(max_examples=50, deadline=None)
@given(samples=train_steps(), mode=MODES, objective=OBJECTIVES, layout=LAYOUTS)
def test_float32_agrees_with_the_definition(samples, mode, objective, layout):
    got = run_step(samples, mode, objective, dtype=torch.float32, **layout)
    assert_same(got, slow_step(samples, mode, objective), tolerance=1e-5)


@settings(max_examples=60, deadline=None)
@given(samples=train_steps(), mode=MODES, layout=LAYOUTS, data=st.data())
def test_order_of_samples_does_not_matter(samples, mode, layout, data):
    shuffled = data.draw(st.permutations(samples))
    assert_same(run_step(shuffled, mode, POLICY, **layout), run_step(samples, mode, POLICY, **layout))


@pytest.mark.parametrize("poison", [math.nan, 1e9])
@settings(max_examples=25, deadline=None)
@given(samples=train_steps(), mode=MODES, layout=LAYOUTS)
def test_masked_and_padded_slots_do_not_matter(poison, samples, mode, layout):
    clean, poisoned = run_step(samples, mode, POLICY, **layout), run_step(samples, mode, POLICY, poison, **layout)
    assert poisoned[0] == clean[0]
    assert all(torch.equal(*pair) for pair in zip(poisoned[1], clean[1], strict=True))
