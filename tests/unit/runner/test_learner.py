"""The learning half of a step: what ranks receive depends on no layout, and every number is the definition's."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from rlrecipes.config.compose import compose
from rlrecipes.config.schema import RlConfig
from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.training import Learner, build_objective
from rlrecipes.tracking.metrics import check_metrics
from rlrecipes.types import Completion, Group, Prompt, Rollout, RolloutStatus, Sample, TokenScores, Turn

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
LAYOUT = [
    f"parallel.{name}=2"
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
]


def plan_of(*overrides):
    recipe = compose(["schedule.prompts_per_step=4", "algo.group_size=2", *overrides])
    return resolve(recipe.config, HOSTS, recipe.origins)


class ScriptedTrainers:
    """Answers as ranks would: the logprob of a token is -token/100, of the reference twice that."""

    def __init__(self, plan):
        self.plan = plan
        self.train_steps = []
        self.critic_steps = []
        self.asked = []
        self.num_idle = []  # samples of each train step that go forward only

    async def run(self, method, *shared, per_rank=None, ranks=None):
        trainer = self.plan.trainer
        if method == "measure_peak_flops":
            return [1e9] * trainer.num_ranks
        tp, dp = trainer.tensor_model_parallel_size, trainer.data_parallel_size
        if method == "train_step":
            assert len({(len(moving), len(idle)) for moving, idle in per_rank}) == 1
            self.num_idle += [sum(len(mb.sample_indices) for rank in range(dp) for mb in per_rank[rank * tp][1])]
        rows = [[mb for row in arguments for mb in row] for arguments in per_rank]
        assert len(rows) == trainer.num_ranks
        for rank, arguments in enumerate(per_rank):  # TP is fastest, then DP, then PP
            assert all(mine is theirs for mine, theirs in zip(arguments, per_rank[rank // tp % dp * tp], strict=True))
        if method == "compute_values":
            shared = ("values",)
        if method in ("compute_logprobs", "compute_values"):
            (which,) = shared
            self.asked.append(which)
            scale = {"reference": 2.0, "teacher": 3.0}.get(which, 1.0)
            is_output = [rank % tp == 0 and rank >= trainer.num_ranks - tp * dp for rank in range(len(rows))]
            return [
                [np.where(mb.loss_mask, -scale * mb.target_ids / 100, 0).astype(np.float32) for mb in row]
                if is_output[rank]
                else []
                for rank, row in enumerate(rows)
            ]
        if method == "critic_step":
            self.critic_steps.append([mb for replica in range(dp) for mb in rows[replica * tp]])
            return [self.answer(self.critic_steps, value_loss=0.5, value_mean=4.0) for _ in rows]
        self.train_steps.append([mb for replica in range(dp) for mb in rows[replica * tp]])
        return [
            self.answer(
                self.train_steps,
                **({"entropy": 4.0, "policy_loss": 0.5} if isinstance(self.plan.algo, RlConfig) else {"nll": 4.0}),
                ratio_max=1.0,
                rollout_logprob_abs_diff_mean=0.02,
                rollout_logprob_abs_diff_max=0.3,
            )
            for _ in rows
        ]

    def answer(self, steps, **metrics):
        """Metrics of the last of these train steps; all but its tokens grow with their number."""
        metrics |= {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1}
        return {name: value * len(steps) for name, value in metrics.items()} | {
            "num_tokens": float(sum(mb.loss_mask.sum() for mb in steps[-1]))
        }


def group_of(index, rewards, statuses=None, weight_version=0):
    prompt = Prompt(index, (1, 2), "p")
    rollouts = []
    for sibling, reward in enumerate(rewards):
        ids = tuple(10 + index + sibling + t for t in range(1 + sibling))
        completion = Completion(ids, tuple(-0.5 for _ in ids), "stop", weight_version)
        status = (statuses or {}).get(sibling, RolloutStatus.COMPLETED)
        rollouts.append(Rollout(prompt, sibling, (Turn((1, 2), completion),), "r", status, reward))
    return Group(prompt, tuple(rollouts))


def train(plan, groups, step=0):
    trainers = ScriptedTrainers(plan)
    return trainers, asyncio.run(Learner(plan, trainers).train_groups(groups, step=step, weight_version=3))


GROUPS = [group_of(0, [1.0, 0.0]), group_of(1, [0.0, 0.0]), group_of(2, [0.0, 1.0]), group_of(3, [1.0, 1.0])]


def per_token(trainers, field, steps=None):
    """{(target id, length of its sample): value} over all trained tokens of all train steps."""
    found = {}
    for micro_batches in trainers.train_steps if steps is None else steps:
        for mb in micro_batches:
            for start, end in zip(mb.cu_seqlens, mb.cu_seqlens[1:], strict=False):
                for t in range(start, end):
                    if mb.loss_mask[t]:
                        found[int(mb.target_ids[t]), int(end - start)] = float(getattr(mb, field)[t])
    return found


@pytest.mark.parametrize("field", ["advantages", "old_logprobs", "rollout_logprobs", "loss_weights"])
def test_what_ranks_receive_does_not_depend_on_the_layout(field):
    two_steps = "schedule.num_train_steps=2"
    alone, _ = train(plan_of(two_steps), GROUPS)
    split, _ = train(plan_of(two_steps, *LAYOUT), GROUPS)
    assert per_token(alone, field) == per_token(split, field) != {}


def test_advantages_weights_and_old_logprobs_are_the_definitions():
    trainers, metrics = train(plan_of("schedule.num_train_steps=2"), GROUPS)
    assert len(trainers.train_steps) == 2
    assert trainers.asked == ["policy"]
    advantages = per_token(trainers, "advantages")
    assert advantages[10, 3] == pytest.approx(2**-0.5, rel=1e-5)  # (1 - 1/2) / std of (1, 0)
    assert advantages[11, 4] == pytest.approx(-(2**-0.5), rel=1e-5)
    assert advantages[11, 3] == advantages[13, 3] == 0.0
    for micro_batches in trainers.train_steps:
        assert sum(mb.loss_weights.sum() for mb in micro_batches) == pytest.approx(1.0)
    assert all(
        value == pytest.approx(-token / 100) for (token, _), value in per_token(trainers, "old_logprobs").items()
    )
    assert metrics["train/num_train_steps"] == 2
    assert metrics["train/num_tokens"] == sum(3 + s for _ in GROUPS for s in (0, 1))


def test_train_steps_of_a_step_weigh_what_they_trained():
    failed = {0: RolloutStatus.FAILED}
    groups = [group_of(index, [1.0, 0.0], failed if index > 1 else None) for index in range(4)]
    _, metrics = train(plan_of("schedule.num_train_steps=2"), groups)
    expected = {
        "entropy": (4 * 6 + 8 * 4) / 10,  # six trained tokens, then four
        "loss": 1.5,
        "policy_loss": 0.75,
        "grad_norm": 3.0,
        "lr": 0.2,
        "ratio_max": 2.0,
        "rollout_logprob_abs_diff_mean": 0.02,  # of the first
    }
    assert {name: metrics[f"train/{name}"] for name in expected} == pytest.approx(expected)

    plan = plan_of(*PPO, "schedule.num_train_steps=2", "algo.critic.num_warmup_steps=0")
    _, metrics = train(plan, groups)
    expected = {"value_mean": 5.6, "loss": 1.5, "value_loss": 0.75, "grad_norm": 3.0, "lr": 0.2, "num_tokens": 4.0}
    assert {name: metrics[f"critic/{name}"] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overrides", "num_idle"),
    [
        ((), [4]),
        (("algo.kl.placement=loss", "algo.kl.coef=0.1"), [0]),
        (("algo.entropy_coef=0.1",), [0]),
        (("schedule.num_train_steps=2",), [2, 2]),
        (LAYOUT, [4]),
    ],
)
def test_samples_without_gradient_go_forward_only(overrides, num_idle):
    trainers, metrics = train(plan_of(*overrides), GROUPS)
    assert trainers.num_idle == num_idle
    num_idle_tokens = sum(3 + sibling for sibling in (0, 1)) * sum(num_idle) / 2
    assert metrics["train/forward_only_fraction"] == num_idle_tokens / metrics["train/num_tokens"]


def compute_flops(plan, metrics, num_ranks, rank_flops_per_s):
    """What the metric says was done."""
    return metrics["train/mfu_fraction"] * metrics["train/time_s"] * num_ranks * rank_flops_per_s


def test_mfu_counts_what_was_done_against_what_the_hardware_can():
    plan = plan_of()
    _, metrics = train(plan, GROUPS)
    moving = sum(3 + s for s in (0, 1)) * 2  # the other two groups have one reward and go forward only
    done = plan.model.flops_per_token * (moving + moving / 3)
    assert compute_flops(plan, metrics, 1, 1e9) == pytest.approx(done)

    plan = plan_of(*LAYOUT)
    gpu = compose(["cluster=h100_8"]).config.cluster.gpu.model_copy(update={"bf16_flops_per_s": 3e14})
    on_gpus = {"trainer": plan.trainer.model_copy(update={"device": "cuda"})}
    known = plan.model_copy(update={**on_gpus, "cluster": plan.cluster.model_copy(update={"gpu": gpu})})
    _, metrics = train(known, GROUPS)
    assert compute_flops(known, metrics, 8, 3e14) == pytest.approx(done)
    unknown = plan.model_copy(update={**on_gpus, "cluster": plan.cluster.model_copy(update={"gpu": None})})
    assert "train/mfu_fraction" not in train(unknown, GROUPS)[1]


def test_mfu_counts_the_critic_and_no_policy_that_waits_for_it():
    plan = plan_of("algo=ppo", "algo.critic.num_warmup_steps=1", "schedule.num_steps=3")
    shapes = plan.model.shapes
    critic = plan.model.flops_per_token - 6 * (shapes.vocab_size - 1) * shapes.hidden_size
    groups = [group_of(index, [float(index)]) for index in range(4)]
    num_tokens = 4 * 3
    _, metrics = train(plan, groups, step=0)
    assert compute_flops(plan, metrics, 1, 1e9) == pytest.approx(critic * num_tokens)
    _, metrics = train(plan, groups, step=1)
    assert compute_flops(plan, metrics, 1, 1e9) == pytest.approx((critic + plan.model.flops_per_token) * num_tokens)


def test_a_train_step_without_any_gradient_is_still_one():
    trainers, _ = train(plan_of(), [group_of(index, [1.0, 1.0]) for index in range(4)])
    assert trainers.num_idle == [0] and len(per_token(trainers, "advantages")) > 0


def test_the_kl_in_the_reward_is_taken_before_the_baseline():
    plan = plan_of("algo.kl.placement=reward", "algo.kl.coef=0.5", "algo.kl.estimator=k1", "algo.normalize_std=false")
    trainers, _ = train(plan, GROUPS)
    assert trainers.asked == ["policy", "reference"]
    # k1 = logprob - ref_logprob = token/100; sibling 0 generated (10,), sibling 1 (11, 12)
    first, second = 1.0 - 0.5 * 0.10, 0.0 - 0.5 * 0.23
    assert per_token(trainers, "advantages")[10, 3] == pytest.approx(first - (first + second) / 2, rel=1e-5)


def test_the_kl_in_the_loss_gives_ranks_the_reference():
    trainers, _ = train(plan_of("algo.kl.placement=loss", "algo.kl.coef=0.1"), GROUPS)
    assert trainers.asked == ["reference"]
    values = per_token(trainers, "ref_logprobs")
    assert values
    assert all(value == pytest.approx(-token / 50) for (token, _), value in values.items())


def test_the_only_train_step_needs_no_old_logprobs():
    trainers, _ = train(plan_of(), GROUPS)
    assert trainers.asked == []
    assert all(mb.old_logprobs is None for mb in trainers.train_steps[0])


def test_the_engines_logprobs_serve_as_old_ones_when_asked():
    trainers, _ = train(plan_of("algo.old_logprobs=rollout"), GROUPS)
    assert set(per_token(trainers, "old_logprobs").values()) == {-0.5}


@pytest.mark.parametrize(("old", "mismatch"), [("rollout", 0.25), ("recompute", 0.0)])
def test_where_the_engines_logprobs_are_the_old_ones_the_trainers_own_are_held_against_them(old, mismatch):
    given = torch.tensor([-0.5])
    batch = {"advantages": torch.ones(1), "old_logprobs": given, "rollout_logprobs": given}
    objective = build_objective(plan_of(f"algo.old_logprobs={old}"))
    _, metrics = objective({"loss_mask": torch.tensor([True]), **batch}, torch.tensor([-0.75]), None)
    assert metrics["mismatch_kl_k1"].tolist() == [mismatch]


def test_failed_rollouts_are_not_trained_and_all_failed_is_an_error():
    failed = {0: RolloutStatus.FAILED}
    groups = [group_of(0, [0.0, 1.0], failed), *GROUPS[1:]]
    trainers, _ = train(plan_of(), groups)
    assert (10, 3) not in per_token(trainers, "advantages")
    everything = {0: RolloutStatus.FAILED, 1: RolloutStatus.FAILED}
    with pytest.raises(TrainerError, match="no sample"):
        train(plan_of(), [group_of(index, [0.0, 0.0], everything) for index in range(4)])


@pytest.mark.parametrize("algo", ["grpo", "dapo", "ppo"])
def test_a_train_step_whose_rollouts_all_failed_is_passed_over(algo):
    failed = {0: RolloutStatus.FAILED, 1: RolloutStatus.FAILED}
    groups = [*(group_of(i, [1.0, 0.0]) for i in (0, 1)), *(group_of(i, [0.0, 0.0], failed) for i in (2, 3))]
    plan = plan_of(f"algo={algo}", "algo.group_size=2", "schedule.num_train_steps=2")
    trainers, metrics = train(plan, groups)
    assert len(trainers.train_steps) == metrics["train/num_train_steps"] == 1
    assert not any(np.isnan(value) for value in metrics.values())


def train_on_demonstrations(*overrides):
    """SFT on responses of 1, 1, 2 and 2 tokens."""
    recipe = compose(["algo=sft", "schedule.prompts_per_step=4", *overrides])
    plan = resolve(recipe.config, HOSTS, recipe.origins)
    lengths = (1, 1, 2, 2)
    samples = [Sample((1, *range(n)), (False, *[True] * n), None, index, 0) for index, n in enumerate(lengths)]
    return asyncio.run(Learner(plan, ScriptedTrainers(plan)).train_samples(samples))


def test_the_loss_of_sft_over_several_train_steps_weighs_their_tokens():
    metrics = train_on_demonstrations("schedule.num_train_steps=2")
    assert metrics["sft/loss"] == pytest.approx((4 * 2 + 8 * 4) / 6)


@pytest.mark.parametrize("aggregation", ["per_token", "per_sequence"])
def test_the_loss_of_sft_is_the_nll_of_a_token_however_it_is_weighted(aggregation):
    metrics = train_on_demonstrations(f"algo.aggregation={aggregation}")
    assert check_metrics(metrics) == metrics
    assert (metrics["train/loss"], metrics["sft/loss"], metrics["sft/num_tokens"]) == (1.0, 4.0, 6)


PPO = ["algo=ppo", "algo.group_size=2", "algo.whiten_advantages=false"]


def test_the_critic_sees_values_and_returns_and_warms_up_alone():
    plan = plan_of(*PPO, "algo.critic.num_warmup_steps=1", "algo.gae_lambda=1.0")
    trainers, metrics = train(plan, GROUPS, step=0)
    assert trainers.asked == ["values"] and trainers.train_steps == [] and len(trainers.critic_steps) == 1
    values = per_token(trainers, "old_values", trainers.critic_steps)
    returns = per_token(trainers, "returns", trainers.critic_steps)
    assert all(value == pytest.approx(-token / 100) for (token, _), value in values.items())
    assert returns[10, 3] == 1.0 and returns[11, 4] == returns[12, 4] == 0.0  # undiscounted: the reward of the rollout
    assert metrics["critic/value_loss"] == 0.5 and metrics["train/num_train_steps"] == 0
    assert metrics["train/num_micro_batches"] == len(trainers.critic_steps[0]) > 0
    assert "critic/explained_variance" in metrics
    trainers, metrics = train(plan, GROUPS, step=1)
    assert len(trainers.train_steps) == len(trainers.critic_steps) == 1
    assert metrics["train/num_micro_batches"] == len(trainers.train_steps[0]) + len(trainers.critic_steps[0])
    advantages = per_token(trainers, "advantages")
    assert advantages[10, 3] == pytest.approx(1.0 + 10 / 100)


def test_the_teacher_pulls_before_whitening(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    teacher = [f"algo.distillation.teacher_path={tmp_path}", "algo.distillation.coef=0.5"]
    trainers, _ = train(plan_of("algo=opd", "algo.group_size=2", *teacher), GROUPS)
    assert trainers.asked == ["policy", "teacher"]
    # student -token/100, teacher -3 token/100: the student likes the token more than the teacher does
    assert all(
        value == pytest.approx(-0.5 * 2 * token / 100)
        for (token, _), value in per_token(trainers, "advantages").items()
    )


def scored(groups, scale, **names):
    """The groups, with what served models said: -scale x token/100, as ranks of a trainer would."""

    def fill(rollout):
        (turn,) = rollout.turns
        ids = turn.completion.token_ids
        logprobs = tuple(-scale * token / 100 for token in ids)
        topk = tuple((token, token + 1) for token in ids), tuple((value, value - 1) for value in logprobs)
        scores = {name: TokenScores(logprobs, *(topk if has_topk else ())) for name, has_topk in names.items()}
        completion = dataclasses.replace(turn.completion, **scores)
        return dataclasses.replace(rollout, turns=(dataclasses.replace(turn, completion=completion),))

    return [dataclasses.replace(group, rollouts=tuple(map(fill, group.rollouts))) for group in groups]


@pytest.fixture
def served(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return ["topology=embedded_teacher", f"topology.served_models.teacher.path={tmp_path}"]


def test_a_served_teacher_pulls_as_one_that_the_trainer_holds(served):
    teacher = ["algo=opd", "algo.group_size=2", "algo.distillation.coef=0.5"]
    held, _ = train(plan_of(*teacher, f"algo.distillation.teacher_path={served[1].split('=')[1]}"), GROUPS)
    groups = scored(GROUPS, 3.0, teacher=False)
    asked, _ = train(plan_of(*served, *teacher, "algo.distillation.teacher_model=teacher"), groups)
    assert asked.asked == ["policy"]
    assert per_token(asked, "advantages") == pytest.approx(per_token(held, "advantages"))
    with pytest.raises(TrainerError, match="needs teacher_logprobs"):
        train(plan_of(*served, *teacher, "algo.distillation.teacher_model=teacher"), GROUPS)


def test_ranks_get_the_likeliest_tokens_of_a_served_teacher(served):
    teacher = ["algo=opd", "algo.group_size=2", "algo.distillation.form=topk", "algo.distillation.top_k=2"]
    plan = plan_of(*served, *teacher, "algo.distillation.teacher_model=teacher")
    trainers, _ = train(plan, scored(GROUPS, 3.0, teacher=True))
    assert trainers.asked == []
    for mb in (mb for step in trainers.train_steps for mb in step):
        targets = mb.target_ids[mb.loss_mask]
        assert len(targets)
        assert mb.teacher_topk_ids[mb.loss_mask].tolist() == [[token, token + 1] for token in targets]
        expected = np.stack([-3 * targets / 100, -3 * targets / 100 - 1], axis=1)
        np.testing.assert_allclose(mb.teacher_topk_logprobs[mb.loss_mask], expected, rtol=1e-6)
        assert not mb.teacher_topk_logprobs[~mb.loss_mask].any()


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_served_reference_is_the_one_that_the_trainer_would_hold(served, placement):
    kl = [f"algo.kl.placement={placement}", "algo.kl.coef=0.5", "algo.kl.estimator=k2"]
    held, _ = train(plan_of(*kl), GROUPS)
    plan = plan_of(*served, *kl, "algo.kl.reference_model=teacher")
    asked, _ = train(plan, scored(GROUPS, 2.0, reference=False))
    assert "reference" in held.asked
    assert "reference" not in asked.asked
    for field in ("ref_logprobs", "advantages"):
        assert per_token(asked, field) == pytest.approx(per_token(held, field))


def test_a_truncated_rollout_is_left_out_of_baseline_and_loss():
    truncated = {1: RolloutStatus.TRUNCATED}
    overlong = ["algo=dapo", "algo.overlong.buffer_tokens=0", "algo.normalize_std=false", "algo.group_size=3"]
    groups = [group_of(0, [1.0, 0.0, 0.0], truncated), *(group_of(i, [1.0, 0.0, 0.0]) for i in (1, 2, 3))]
    trainers, metrics = train(plan_of(*overlong), groups)
    advantages = per_token(trainers, "advantages")
    assert advantages[10, 3] == pytest.approx(0.5)  # against the one that counts beside it
    assert metrics["overlong/filtered_fraction"] == pytest.approx(1 / 12)
    num_trained = sum(int(mb.loss_mask.sum()) for mb in trainers.train_steps[0])
    assert num_trained == 4 * (1 + 2 + 3) - 2


def test_long_responses_lose_reward_softly():
    overlong = ["algo=dapo", "algo.overlong.buffer_tokens=15", "algo.overlong.should_filter=false"]
    plain = ["algo.baseline=none", "algo.normalize_std=false"]
    trainers, metrics = train(plan_of(*overlong, *plain), GROUPS)
    advantages = per_token(trainers, "advantages")
    assert advantages[10, 3] == 1.0  # 1 token of 16: at the edge of the buffer
    assert advantages[11, 4] == pytest.approx(-1 / 15)
    assert metrics["overlong/penalty_mean"] == pytest.approx(-1 / 30)


def test_a_response_of_several_turns_may_be_as_long_as_all_of_them():
    turns = [
        f"rollout{word}" for word in ("=multi_turn", ".generate.max_turns=3", ".generate.max_observation_tokens=8")
    ]
    overlong = ["algo=dapo", "algo.overlong.buffer_tokens=47", "algo.overlong.should_filter=false"]
    _, metrics = train(plan_of(*turns, *overlong), GROUPS)
    assert metrics["overlong/penalty_mean"] == pytest.approx(-1 / 47 / 2)  # 2 tokens of 48 in every other rollout
    alone, _ = train(plan_of("algo.aggregation=constant"), GROUPS)
    trainers, _ = train(plan_of("algo.aggregation=constant", *turns), GROUPS)
    weights = per_token(trainers, "loss_weights")
    assert {key: 3 * weight for key, weight in weights.items()} == pytest.approx(per_token(alone, "loss_weights"))


def test_age_in_weight_versions_reaches_the_loss():
    stale = ["algo.off_policy.staleness_power=0.5", "schedule.num_train_steps=2"]
    groups = [group_of(index, [1.0, 0.0], weight_version=index) for index in range(4)]
    trainers, _ = train(plan_of(*stale), groups)
    assert per_token(trainers, "staleness")[10, 3] == 3.0 and per_token(trainers, "staleness")[13, 3] == 0.0


@pytest.mark.parametrize(("limit", "says"), [("mean_limit=0.01", "mean 0.02"), ("max_limit=0.2", "max 0.3")])
def test_disagreement_beyond_the_limit_stops_the_run(limit, says):
    with pytest.raises(TrainerError, match=says):
        train(plan_of(f"algo.logprob_diff_{limit}"), GROUPS)
    train(plan_of("algo.logprob_diff_mean_limit=0.05", "algo.logprob_diff_max_limit=0.5"), GROUPS)


def test_a_loss_of_ones_own_is_all_the_loss(tmp_path, monkeypatch):
    source = "def compute(batch, logprobs, entropy, *, scale):\n    return -scale * logprobs, {}\n"
    (tmp_path / "my_loss.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["algo.policy_loss=my_loss:compute", "+algo.policy_loss_options.scale=2.0"]
    trainers, _ = train(plan_of(*own), GROUPS)
    assert trainers.num_idle == [0]  # what it does with advantages of 0 is its own
    objective = build_objective(plan_of(*own))
    batch = {"loss_mask": torch.tensor([True, False])}
    loss, _ = objective(batch, torch.tensor([-1.0, float("nan")]), None)
    assert loss.tolist() == [2.0, 0.0]
