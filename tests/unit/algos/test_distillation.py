import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.distillation import compute_distilled_advantages, compute_topk_reverse_kl
from rlrecipes.algos.policy_loss import compute_clipped_policy_loss
from rlrecipes.errors import ContractError

STUDENT = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64)
TEACHER = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(0)
LOGITS = st.lists(st.floats(-4, 4), min_size=5, max_size=5)


def reverse_kl(logprobs, teacher):
    return (logprobs.exp() * (logprobs - teacher)).sum(-1)


def expected_gradient(coef, advantages=0.0):
    """Of the policy loss, over tokens drawn from the student, to its logits."""
    logits = STUDENT.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    distilled = compute_distilled_advantages(
        advantages=torch.full_like(STUDENT, advantages),
        old_logprobs=logprobs,
        teacher_logprobs=TEACHER,
        loss_mask=torch.ones(4, dtype=torch.bool),
        distillation_coef=coef,
    )
    loss, _, _ = compute_clipped_policy_loss(
        logprobs=logprobs, old_logprobs=logprobs, advantages=distilled, clip_low=0.2, clip_high=0.2
    )
    (logprobs.detach().exp() * loss).sum().backward()
    return logits.grad


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    logits = STUDENT.clone().requires_grad_()
    reverse_kl(logits.log_softmax(0), TEACHER).backward()
    torch.testing.assert_close(expected_gradient(0.7), 0.7 * logits.grad)
    # A constant reward has no direction of its own, so distillation on top of it goes the same way.
    torch.testing.assert_close(expected_gradient(0.7, advantages=3.0), 0.7 * logits.grad)


def test_following_it_reaches_the_teacher_and_a_plus_sign_leaves_it():
    def walk(coef):
        logits = STUDENT.clone()
        for _ in range(200):
            leaf = logits.clone().requires_grad_()
            logprobs = leaf.log_softmax(0)
            distilled = compute_distilled_advantages(
                advantages=torch.zeros_like(logits),
                old_logprobs=logprobs,
                teacher_logprobs=TEACHER,
                loss_mask=torch.ones(4, dtype=torch.bool),
                distillation_coef=coef,
            )
            loss, _, _ = compute_clipped_policy_loss(
                logprobs=logprobs, old_logprobs=logprobs, advantages=distilled, clip_low=0.2, clip_high=0.2
            )
            (logprobs.detach().exp() * loss).sum().backward()
            logits = logits - 0.3 * leaf.grad
        return float(reverse_kl(logits.log_softmax(0), TEACHER))

    start = float(reverse_kl(STUDENT.log_softmax(0), TEACHER))
    assert walk(1.0) < 1e-3 < start < walk(-1.0)


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(
        st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.booleans()), min_size=1, max_size=6
    ),
    coef=st.floats(0, 3),
    poison=st.sampled_from([math.nan, 1e9, -math.inf]),
)
def test_equals_a_loop_and_masked_tokens_do_not_matter(tokens, coef, poison):
    student, teacher, advantages, mask = (torch.tensor(column) for column in zip(*tokens, strict=True))
    got = compute_distilled_advantages(
        advantages=advantages.double(),
        old_logprobs=torch.where(mask, student.double(), poison),
        teacher_logprobs=torch.where(mask, teacher.double(), poison),
        loss_mask=mask,
        distillation_coef=coef,
    )
    for value, (s, t, a, is_trained) in zip(
        got.tolist(), zip(*[x.tolist() for x in (student, teacher, advantages, mask)], strict=True), strict=True
    ):
        assert value == pytest.approx(a - coef * (s - t) if is_trained else a, rel=1e-6, abs=1e-9)


def test_the_inputs_stay_and_nothing_has_a_gradient():
    leaves = [torch.tensor([value], requires_grad=True) for value in (0.5, -1.0, -0.4)]
    got = compute_distilled_advantages(
        advantages=leaves[0],
        old_logprobs=leaves[1],
        teacher_logprobs=leaves[2],
        loss_mask=torch.tensor([True]),
        distillation_coef=1.0,
    )
    assert float(got) == pytest.approx(1.1) and not got.requires_grad and float(leaves[0].detach()) == 0.5


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_trained_token_without_a_probability_is_refused(bad):
    with pytest.raises(ContractError, match="no finite log probability"):
        compute_distilled_advantages(
            advantages=torch.zeros(1),
            old_logprobs=torch.zeros(1),
            teacher_logprobs=torch.tensor([bad]),
            loss_mask=torch.tensor([True]),
            distillation_coef=1.0,
        )


def test_other_shapes_are_refused():
    with pytest.raises(ContractError, match="shapes differ"):
        compute_distilled_advantages(
            advantages=torch.zeros(2),
            old_logprobs=torch.zeros(2),
            teacher_logprobs=torch.zeros(1),
            loss_mask=torch.ones(2, dtype=torch.bool),
            distillation_coef=1.0,
        )
    with pytest.raises(ContractError, match="shapes differ"):
        compute_topk_reverse_kl(topk_logprobs=torch.zeros(2, 3), teacher_topk_logprobs=torch.zeros(2, 1))


@settings(max_examples=60, deadline=None)
@given(student=LOGITS, teacher=LOGITS, k=st.integers(1, 5))
def test_topk_equals_the_kl_of_the_coarser_distribution_in_value_and_gradient(student, teacher, k):
    teacher = torch.tensor(teacher, dtype=torch.float64).log_softmax(0)
    kept = teacher.topk(k).indices
    logits = torch.tensor(student, dtype=torch.float64).requires_grad_()
    logprobs = logits.log_softmax(0)
    got = compute_topk_reverse_kl(topk_logprobs=logprobs[kept], teacher_topk_logprobs=teacher[kept])
    (gradient,) = torch.autograd.grad(got, logits, retain_graph=True)
    rest = [token for token in range(5) if token not in kept.tolist()]
    coarse = [
        torch.cat([each[kept], each[rest].logsumexp(0, keepdim=True)]) if rest else each[kept]
        for each in (logprobs, teacher)
    ]
    expected = reverse_kl(*coarse)
    (expected_gradient_,) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient_, rtol=1e-6, atol=1e-6)
    assert -1e-9 <= got.item() <= reverse_kl(logprobs, teacher).item() + 1e-6


def test_topk_gradient_is_the_closed_form():
    topk = torch.tensor([[0.5, 0.2], [0.1, 0.05]], dtype=torch.float64)
    teacher = torch.tensor([[0.4, 0.4], [0.3, 0.6]], dtype=torch.float64)
    leaf, fixed = topk.log().requires_grad_(), teacher.log().requires_grad_()
    compute_topk_reverse_kl(topk_logprobs=leaf, teacher_topk_logprobs=fixed).sum().backward()
    assert fixed.grad is None
    rest = torch.log((1 - topk.sum(-1)) / (1 - teacher.sum(-1))).unsqueeze(-1)
    torch.testing.assert_close(leaf.grad, topk * ((topk / teacher).log() - rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_and_tokens_without_mass_stay_finite(dtype):
    leaf = torch.tensor([[0.0, -math.inf], [-1e-9, -30.0], [-math.inf, -math.inf]], dtype=dtype).requires_grad_()
    teacher = torch.tensor([[-0.5, -1.0], [-math.inf, 0.0], [0.0, -40.0]], dtype=dtype)
    loss = compute_topk_reverse_kl(topk_logprobs=leaf, teacher_topk_logprobs=teacher)
    loss.sum().backward()
    assert loss.isfinite().all() and leaf.grad.isfinite().all()


def test_following_the_topk_form_nears_the_teacher():
    logits = STUDENT.clone()
    kept = TEACHER.topk(2).indices
    for _ in range(300):
        leaf = logits.clone().requires_grad_()
        compute_topk_reverse_kl(topk_logprobs=leaf.log_softmax(0)[kept], teacher_topk_logprobs=TEACHER[kept]).backward()
        logits = logits - 0.3 * leaf.grad
    torch.testing.assert_close(logits.log_softmax(0)[kept], TEACHER[kept], rtol=1e-2, atol=1e-2)
