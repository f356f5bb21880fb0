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
from rlrecipes.algos.objective import compute_custom_objective, compute_policy_objective, compute_sft_objective
from rlrecipes.algos.off_policy import OffPolicy
from rlrecipes.algos.value_loss import compute_value_objective
from rlrecipes.batching.grid import build_grid
from rlrecipes.types import Sample

VOCABULARY, WIDTH = 7, 4
DIVISOR = 5.0
MODES = ["per_sequence", "per_rollout", "per_prompt", "per_token", "constant"]
OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "kl_coef_in_loss": 0.3, "entropy_coef": 0.05}
POLICY = partial(compute_policy_objective, kl_estimator="k3", **OPTIONS)
BOUNDS = {"low": 0.4, "high": 2.0}


def compute_squares(batch, logprobs, entropy, *, scale):
    """A loss of one's own."""
    loss = scale * batch["advantages"] * logprobs.square()
    return loss, {"square": loss}


def compute_values(batch, logprobs, entropy):
    """The critic's loss; what stands in for its values has a gradient to every weight."""
    named = {"old_values": batch["old_logprobs"], "returns": batch["advantages"]}
    return compute_value_objective(batch | named, logprobs, value_clip=0.2)


# Name -> what the trainer calls. The loss of each by plain arithmetic, one sample at a time, is slow_losses below.
OBJECTIVES = {
    "clipped": POLICY,
    "gspo": partial(POLICY, policy_loss="gspo"),
    "cispo": partial(POLICY, policy_loss="cispo", dual_clip=None),
    "unbiased_kl": partial(POLICY, kl_is_unbiased=True),
    "token_tis": partial(POLICY, off_policy=OffPolicy(correction="token_tis", **BOUNDS)),
    "sequence_tis": partial(POLICY, off_policy=OffPolicy(correction="sequence_tis", **BOUNDS)),
    "token_mis": partial(POLICY, off_policy=OffPolicy(correction="token_mis", **BOUNDS, veto=0.2)),
    "sequence_mis": partial(POLICY, off_policy=OffPolicy(correction="sequence_mis", **BOUNDS)),
    "geometric_mis": partial(POLICY, off_policy=OffPolicy(correction="geometric_mis", **BOUNDS)),
    "icepop": partial(POLICY, off_policy=OffPolicy(correction="icepop", **BOUNDS)),
    "decoupled": partial(POLICY, off_policy=OffPolicy(correction="decoupled", **BOUNDS)),
    "opsm": partial(POLICY, policy_loss="gspo", off_policy=OffPolicy(opsm_delta=0.05)),
    "staleness": partial(POLICY, off_policy=OffPolicy(staleness_power=1.0)),
    "topk": partial(POLICY, distillation_topk_coef=0.4),
    "sft": compute_sft_objective,
    "custom": partial(compute_custom_objective, function=compute_squares, options={"scale": 0.5}),
    "value": compute_values,
}
EVERY_LOSS = pytest.mark.parametrize("name", OBJECTIVES)
EVERY_MODE = pytest.mark.parametrize("mode", MODES)
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


def age_of(sample):
    return (sample.prompt_index + 2 * sample.sibling) % 4


def teacher_of(target_ids):
    """Two tokens the teacher likes where a target comes next, and its log probabilities of them."""
    return torch.stack([(target_ids + 1) % VOCABULARY, (target_ids + 3) % VOCABULARY], -1), torch.tensor(
        [0.5, 0.2]
    ).log()


def build_batch(micro_batch, samples, logprobs, dtype, poison):
    """What an objective reads, [T] each, from the arrays of a micro-batch; poison in every slot that is masked."""
    arrays = {f.name: getattr(micro_batch, f.name) for f in fields(micro_batch)}
    batch = {name: torch.tensor(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
    lengths = torch.tensor(np.diff(micro_batch.cu_seqlens))
    sample_index = torch.arange(len(lengths)).repeat_interleave(lengths)
    ages = [age_of(samples[index]) for index in micro_batch.sample_indices]
    ages += [0] * (len(lengths) - len(ages))
    topk_ids, teacher_topk = teacher_of(batch["target_ids"])
    batch |= {"sample_index": sample_index, "staleness": torch.tensor(ages, dtype=dtype)[sample_index]}
    batch |= {
        "topk_logprobs": logprobs.gather(1, topk_ids),
        "teacher_topk_logprobs": teacher_topk.expand(len(topk_ids), 2),
    }
    batch = {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}
    masks = {1: batch["loss_mask"], 2: batch["loss_mask"].unsqueeze(1)}
    return {
        n: torch.where(masks[t.ndim], t, t + poison) if t.is_floating_point() and n != "loss_weights" else t
        for n, t in batch.items()
    }


def run_step(samples, mode, name, poison=0.0, dtype=torch.float64, **layout):
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
        logprobs = run_policy(parameters, torch.tensor(micro_batch.token_ids), micro_batch.cu_seqlens)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        batch = build_batch(micro_batch, samples, logprobs, dtype, poison)
        loss_weights = batch.pop("loss_weights")
        target_logprobs = logprobs.gather(1, batch["target_ids"].unsqueeze(1)).squeeze(1)
        hidden = torch.where(batch["loss_mask"], 0.0, poison)
        token_losses, metrics = OBJECTIVES[name](batch, target_logprobs + hidden, entropy + hidden)
        assert all(metric.isfinite().all() for metric in metrics.values())
        loss = (token_losses * loss_weights).sum()
        loss.backward()
        total += float(loss.detach())
    return total, [parameter.grad for parameter in parameters]


def slow_weight(name, sample, place, trained, logprobs):
    """What multiplies the policy loss of one token; from the definitions in off_policy.py."""
    gaps = {t: float(sample.old_logprobs[t]) - sample.rollout_logprobs[t] for t in trained}
    low, high = BOUNDS["low"], BOUNDS["high"]
    gap = gaps[place]
    if name.startswith("sequence"):
        gap = sum(gaps.values())
    if name.startswith("geometric"):
        gap = sum(gaps.values()) / len(gaps)
    ratio = math.exp(min(max(gap, -20.0), 20.0))
    if name == "opsm":
        moved = sum(float(sample.old_logprobs[t]) - logprobs[t].item() for t in trained) / len(trained)
        return 0.0 if sample.advantages[place] < 0 and moved > 0.05 else 1.0
    if name == "staleness":
        return 1 / max(age_of(sample), 1)
    if name.endswith("tis"):
        return min(max(ratio, low), high)
    if name == "decoupled":
        return min(ratio, high)
    if name.endswith("mis") or name == "icepop":
        is_vetoed = name == "token_mis" and any(math.exp(each) < 0.2 for each in gaps.values())
        return ratio if low <= ratio <= high and not is_vetoed else 0.0
    return 1.0


def slow_policy_loss(name, logprob, log_ratio, advantage):
    """The policy loss of one token."""
    ratio = log_ratio.exp()
    if name == "cispo":
        return -ratio.detach().clamp(0.8, 1.28) * advantage * logprob
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -(surrogate.clamp(min=3.0 * advantage) if advantage < 0 else surrogate)


def slow_losses(name, parameters, sample):
    """The losses of a sample's trained tokens, each from its own prefix and plain arithmetic."""
    embeddings, output = parameters
    trained = [place for place, is_trained in enumerate(sample.loss_mask) if is_trained]
    distributions, logprobs = {}, {}
    for t in trained:
        prefix = embeddings[list(sample.token_ids[:t])].mean(0)
        distributions[t] = (prefix.tanh() @ output).log_softmax(-1)
        logprobs[t] = distributions[t][sample.token_ids[t]]
    log_ratios = {t: logprobs[t] - float(sample.old_logprobs[t]) for t in trained}
    if name in ("gspo", "opsm") and trained:
        mean = sum(log_ratios.values()) / len(trained)
        log_ratios = dict.fromkeys(trained, mean)
    losses = []
    for t in trained:
        advantage, logprob, old = float(sample.advantages[t]), logprobs[t], float(sample.old_logprobs[t])
        if name == "sft":
            losses.append(-logprob)
        elif name == "custom":
            losses.append(0.5 * advantage * logprob**2)
        elif name == "value":
            near = min(max(logprob.item(), old - 0.2), old + 0.2)
            clipped = logprob if near == logprob.item() else torch.tensor(near, dtype=torch.float64)
            losses.append(torch.maximum((logprob - advantage) ** 2, (clipped - advantage) ** 2))
        else:
            loss = slow_weight(name, sample, t, trained, logprobs) * slow_policy_loss(
                name, logprob, log_ratios[t], advantage
            )
            gap = float(sample.ref_logprobs[t]) - logprob
            kl = gap.exp() - 1 - gap
            kl = kl * (logprob - old).exp() if name == "unbiased_kl" else kl
            loss = loss + 0.3 * kl + 0.05 * (distributions[t].exp() * distributions[t]).sum()
            if name == "topk":
                ids, teacher = teacher_of(torch.tensor(sample.token_ids[t]))
                student = distributions[t][ids].exp()
                rest, teacher_rest = 1 - student.sum(), 1 - teacher.exp().sum()
                loss = loss + 0.4 * ((student * (student.log() - teacher)).sum() + rest * (rest / teacher_rest).log())
            losses.append(loss)
    return losses


def slow_step(samples, mode, name):
    """Loss and gradients of one train step, straight from the definition."""
    parameters = make_parameters()
    units = {}
    for number, sample in enumerate(samples):
        rollout = (sample.prompt_index, sample.sibling)
        unit = {"per_sequence": number, "per_prompt": sample.prompt_index, "per_token": 0}.get(mode, rollout)
        units.setdefault(unit, []).extend(slow_losses(name, parameters, sample))
    zero = 0.0 * sum(parameter.sum() for parameter in parameters)
    means = [sum(unit) / (DIVISOR if mode == "constant" else len(unit)) for unit in units.values() if unit]
    total = zero + sum(means) / len(units)
    total.backward()
    return float(total.detach()), [parameter.grad for parameter in parameters]


def assert_same(got, expected, tolerance=1e-6):
    assert math.isclose(got[0], expected[0], rel_tol=tolerance, abs_tol=tolerance)
    for gradient, expected_gradient in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance)


@EVERY_LOSS
@EVERY_MODE
@settings(max_examples=5, deadline=None)
@given(samples=train_steps(), layout=LAYOUTS)
def test_any_layout_gives_the_loss_of_the_definition(name, mode, samples, layout):
    assert_same(run_step(samples, mode, name, **layout), slow_step(samples, mode, name))


@EVERY_LOSS
@EVERY_MODE
@settings(max_examples=3, deadline=None)
@given(samples=train_steps(), layout=LAYOUTS)
def test_float32_agrees_with_the_definition(name, mode, samples, layout):
    got = run_step(samples, mode, name, dtype=torch.float32, **layout)
    assert_same(got, slow_step(samples, mode, name), tolerance=1e-5)


@EVERY_LOSS
@EVERY_MODE
@settings(max_examples=3, deadline=None)
@given(samples=train_steps(), layout=LAYOUTS, data=st.data())
def test_order_of_samples_does_not_matter(name, mode, samples, layout, data):
    shuffled = data.draw(st.permutations(samples))
    assert_same(run_step(shuffled, mode, name, **layout), run_step(samples, mode, name, **layout))


@EVERY_LOSS
@EVERY_MODE
@settings(max_examples=3, deadline=None)
@given(samples=train_steps(), layout=LAYOUTS)
def test_masked_and_padded_slots_do_not_matter(name, mode, samples, layout):
    clean = run_step(samples, mode, name, **layout)
    for poison in (math.nan, 1e9):
        poisoned = run_step(samples, mode, name, poison, **layout)
        assert poisoned[0] == clean[0]
        assert all(torch.equal(*pair) for pair in zip(poisoned[1], clean[1], strict=True))
