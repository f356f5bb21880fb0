"""The catalogue of metrics: every name a run may log, with its unit, meaning and reading. Owns data, no behaviour.

A name with ``<...>`` in it is an open family: the placeholder stands for a dataset, a reward part or a number and holds
no slash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or one open family of them.

    Attributes:
        name: ``group/name``; may hold ``<placeholders>``.
        unit: of the value; ``1`` when it has none.
        explanation: one line: what is measured.
        reading: one line: how to read it.
        better: the direction people steer to; empty where neither is better as such.
    """

    name: str
    unit: str
    explanation: str
    reading: str
    better: Literal["higher", "lower", ""] = ""


REWARD = (
    Metric(
        "reward/mean",
        "reward",
        "mean reward of the step's rollouts, those of dropped groups too",
        "rising means the policy learns",
        "higher",
    ),
    Metric("reward/std", "reward", "spread of rewards over the step's rollouts", "near 0: nothing left to learn from"),
    Metric("reward/min", "reward", "smallest reward of the step", "constant: some prompts are never solved"),
    Metric("reward/max", "reward", "largest reward of the step", "stuck at the floor: tasks are too hard"),
    Metric("reward_part/<name>", "reward", "mean of one named part of the reward", "shows which part moves the sum"),
)

EVAL = (
    Metric(
        "eval/<dataset>/accuracy",
        "fraction",
        "share of held-out prompts answered right",
        "rising is the goal",
        "higher",
    ),
    Metric(
        "eval/<dataset>/pass_at_<k>",
        "fraction",
        "share of held-out prompts that k answers get right at least once",
        "far above accuracy: the policy can, but not reliably",
        "higher",
    ),
    Metric("eval/<dataset>/reward", "reward", "mean reward on held-out prompts", "should follow reward/mean", "higher"),
    Metric(
        "eval/<dataset>/truncated_fraction", "fraction", "held-out answers cut at the limit", "rising: raise the limit"
    ),
    Metric(
        "eval/<dataset>/response_tokens", "tokens", "mean length of held-out answers", "rising means longer answers"
    ),
)

LENGTHS = (
    Metric(
        "response/mean_tokens",
        "tokens",
        "mean generated tokens a rollout, those of dropped groups too",
        "sudden growth: look for reward hacking",
    ),
    Metric("response/max_tokens", "tokens", "longest response of the step", "at the limit: answers are being cut"),
    Metric("response/min_tokens", "tokens", "shortest response of the step", "near 0: the policy stops at once"),
    Metric("response/truncated_fraction", "fraction", "rollouts cut at the length limit", "above 0.1: raise the limit"),
    Metric("prompt/mean_tokens", "tokens", "mean tokens of the step's prompts", "changes only with the data"),
)

ROLLOUT = (
    Metric("rollout/num_groups", "groups", "groups handed to training", "below the batch size: groups were dropped"),
    Metric("rollout/num_rollouts", "rollouts", "rollouts handed to training", "groups times group size"),
    Metric(
        "rollout/failed_fraction",
        "fraction",
        "rollouts that failed, of all asked in the step: those of dropped groups too",
        "above 0: read the reasons in the log",
        "lower",
    ),
    Metric("rollout/aborted_fraction", "fraction", "rollouts aborted before their end", "rising: work is thrown away"),
    Metric(
        "rollout/zero_variance_fraction",
        "fraction",
        "groups whose rewards are all equal, which teach GRPO nothing, of all asked in the step: dropped ones too",
        "near 1: tasks are all too easy or all too hard",
    ),
    Metric(
        "rollout/num_filtered_groups", "groups", "groups dropped by filters", "rising: more sampling a trained group"
    ),
    Metric(
        "rollout/tokens_per_s_per_gpu",
        "tokens/s",
        "generated tokens a second and accelerator (or CPU engine)",
        "falling at equal lengths: engines are starved or swap",
        "higher",
    ),
    Metric(
        "rollout/longest_tokens_per_s",
        "tokens/s",
        "speed of the step's longest rollout",
        "it bounds the step: falling means a longer tail",
        "higher",
    ),
    Metric(
        "rollout/prefix_cache_hit_fraction",
        "fraction",
        "prompt tokens found in the engines' prefix cache",
        "near (group size - 1) / group size is the most single turns can reach",
        "higher",
    ),
    Metric(
        "rollout/mean_turns", "turns", "mean answers of a rollout", "retrying: falling means right at once more often"
    ),
    Metric(
        "rollout/max_turns", "turns", "most answers of a rollout of the step", "at the limit: episodes are cut there"
    ),
    Metric("rollout/kv_cache_use_fraction", "fraction", "share of KV cache in use at the peak", "at 1: requests queue"),
    Metric("rollout/time_s", "s", "from the first request to the last answer of the step", "lower is faster", "lower"),
)

STALENESS = (
    Metric("staleness/mean", "weight versions", "mean of (trained - sampled) weight version", "0 means on-policy"),
    Metric("staleness/max", "weight versions", "largest age of a trained sample", "never above the schedule's limit"),
)

TRAIN = (
    Metric("train/loss", "1", "the loss the optimizer saw", "near 0 in GRPO by construction: read reward instead"),
    Metric(
        "train/policy_loss",
        "1",
        "policy-gradient part of train/loss, summed as it is: the same where the loss has no other part",
        "its level says little; spikes say trouble",
    ),
    Metric("train/grad_norm", "1", "gradient norm before clipping", "spikes: lower the learning rate"),
    Metric("train/lr", "1", "learning rate of the last train step", "follows the schedule"),
    Metric(
        "train/clip_fraction", "fraction", "trained tokens whose ratio was clipped", "above 0.2: steps are too large"
    ),
    Metric(
        "train/approx_kl",
        "nats",
        "KL of the policy before each update from that of the old logprobs; 0 where the step's one update is its first",
        "above 0.1: steps are too large",
    ),
    Metric("train/ref_kl", "nats", "KL from the frozen reference", "rising: the policy leaves the reference"),
    Metric("train/entropy", "nats", "mean entropy of the policy's next token", "falling to 0: exploration has died"),
    Metric("train/ratio_mean", "1", "mean of new over old probability before each update", "should stay near 1"),
    Metric("train/ratio_max", "1", "largest ratio of new over old probability", "large: a few tokens dominate"),
    Metric(
        "train/rollout_logprob_abs_diff_mean",
        "nats",
        "mean distance of the engine's and the trainer's log probability of a trained token",
        "rising: engine and trainer disagree about the weights or the maths",
        "lower",
    ),
    Metric(
        "train/rollout_logprob_abs_diff_max",
        "nats",
        "largest such distance in the step",
        "a jump: look at that step's weight sync",
        "lower",
    ),
    Metric("train/num_tokens", "tokens", "tokens in the step's train batch, prompts included", "the work of the step"),
    Metric(
        "train/num_train_steps",
        "train steps",
        "optimizer updates of the policy in the step",
        "more than 1: off-policy updates; 0: the critic warms up",
    ),
    Metric(
        "train/num_micro_batches",
        "micro-batches",
        "forward passes of a rank in the step's train steps, the critic's too",
        "fewer is faster",
    ),
    Metric(
        "train/forward_only_fraction",
        "fraction",
        "tokens whose samples have no gradient (all advantages 0), which go forward only",
        "high: most groups teach nothing, as rollout/zero_variance_fraction says",
    ),
    Metric("train/tokens_per_s", "tokens/s", "trained tokens a second, all ranks", "higher is faster", "higher"),
    Metric(
        "train/mfu_fraction",
        "fraction",
        "FLOPs of the train steps, the critic's too and attention's quadratic part aside, of what the bf16 rate of "
        "the Plan's GPU allows; a CPU's rate is measured",
        "low: small batches",
        "higher",
    ),
    Metric(
        "train/gpu_allocated_bytes_max",
        "bytes",
        "most memory that torch had allocated at once in a train step of the policy, on the fullest rank",
        "far below system/gpu_memory_train_bytes: the allocator holds blocks that nothing uses",
    ),
    Metric("train/time_s", "s", "time of the step's train steps", "lower is faster", "lower"),
)

OFF_POLICY = (
    Metric(
        "train/mismatch_kl_k1",
        "nats",
        "mean of rollout minus old log probability: KL from the policy that drew the tokens to the trainer's. With "
        "algo.old_logprobs=rollout the trainer's is the current one: of several train steps, moved by those before",
        "unbiased but noisy; below 0 by more than noise: the tokens were not drawn from what the engine says",
    ),
    Metric(
        "train/mismatch_kl_k3",
        "nats",
        "the same KL by an estimate that is never negative",
        "1e-3 or less when precision alone differs; rising: stale weights, or engine and trainer disagree",
        "lower",
    ),
    Metric(
        "train/off_policy_ratio_p01",
        "1",
        "1st percentile of old over rollout probability (of a sample's, for corrections of sequences); with "
        "algo.old_logprobs=rollout of current over rollout probability, as train/mismatch_kl_k1",
        "far below 1: the engine draws tokens that the trainer thinks rare",
    ),
    Metric("train/off_policy_ratio_p50", "1", "median of the same ratio", "should be 1 to a few thousandths"),
    Metric(
        "train/off_policy_ratio_p99",
        "1",
        "99th percentile of the same ratio",
        "at the upper bound of the correction: it acts on more than a hundredth of the tokens",
    ),
    Metric(
        "train/off_policy_weight_mean",
        "1",
        "mean weight of a trained token in the policy loss",
        "well below 1: masks or age take most of the signal away",
    ),
    Metric(
        "train/off_policy_effective_fraction",
        "fraction",
        "effective sample size over trained tokens: (sum of weights)^2 / (n x sum of squares)",
        "below 0.5: a few tokens decide the update",
        "higher",
    ),
    Metric(
        "train/off_policy_clip_fraction",
        "fraction",
        "trained tokens whose weight a bound or the veto changed",
        "above 0.1: the correction biases the gradient; sync more often or find the mismatch",
        "lower",
    ),
    Metric(
        "train/opsm_fraction",
        "fraction",
        "trained tokens that off-policy sequence masking left out",
        "rising within a step: the policy moves far from what drew the tokens",
    ),
    Metric(
        "train/teacher_topk_kl",
        "nats",
        "KL from policy to teacher over the teacher's likeliest tokens and the rest",
        "falling: the student nears the teacher",
        "lower",
    ),
)

CRITIC = (
    Metric("critic/loss", "reward^2", "the loss the critic's optimizer saw", "falling means it learns", "lower"),
    Metric(
        "critic/value_loss",
        "reward^2",
        "squared error of the critic, clipped, summed as critic/loss is",
        "as critic/loss",
        "lower",
    ),
    Metric("critic/value_clip_fraction", "fraction", "values whose move was clipped", "above 0.2: steps are too large"),
    Metric("critic/value_mean", "reward", "mean value over trained tokens", "should follow critic/return_mean"),
    Metric("critic/return_mean", "reward", "mean target over trained tokens", "follows reward/mean"),
    Metric(
        "critic/explained_variance",
        "fraction",
        "share of the returns' spread that the critic foresaw",
        "near 1 is good; 0 is as good as a constant, below 0 worse",
        "higher",
    ),
    Metric("critic/grad_norm", "1", "its gradient norm before clipping", "spikes: lower algo.critic.optim.lr"),
    Metric("critic/lr", "1", "its learning rate", "follows its own schedule"),
    Metric("critic/num_tokens", "tokens", "trained tokens of its last train step", "as the policy's"),
)

OVERLONG = (
    Metric("overlong/penalty_mean", "reward", "mean of what length took from the reward", "near 0: answers are short"),
    Metric(
        "overlong/filtered_fraction",
        "fraction",
        "rollouts left out because they were cut",
        "high: raise max_new_tokens",
    ),
)

SFT = (
    Metric("sft/loss", "nats", "mean negative log-likelihood of a trained token", "falling means it learns", "lower"),
    Metric("sft/num_tokens", "tokens", "trained tokens in the step", "the work of the step"),
)

WEIGHT_SYNC = (
    Metric(
        "weight_sync/time_s",
        "s",
        "from pausing the engines to continuing them; with the sync after a checkpoint that took their memory",
        "engines stand still so long",
        "lower",
    ),
    Metric("weight_sync/num_bytes", "bytes", "weights sent to each engine", "constant for one model and precision"),
    Metric("weight_sync/weight_version", "1", "version of the weights the engines serve", "rises by one a sync"),
    Metric("weight_sync/is_verified", "0 or 1", "whether all checksums were compared and equal", "0: check is off"),
)

LOOP = (
    Metric(
        "buffer/num_groups",
        "groups",
        "groups collected beyond those trained now",
        "rising: training is the slower side",
    ),
    Metric("time/step_s", "s", "the whole step", "the number to make smaller", "lower"),
    Metric("time/wait_s", "s", "time the trainer waited for rollouts", "high: rollouts are the slower side", "lower"),
    Metric("time/wait_fraction", "fraction", "time/wait_s over time/step_s", "above 0.5: add engines", "lower"),
    Metric("time/idle_fraction", "fraction", "share of the step the engines had no request", "above 0.5: add trainers"),
    Metric("time/logprobs_s", "s", "computing old and reference log probabilities", "lower is faster", "lower"),
    Metric(
        "time/offload_s",
        "s",
        "memory changing hands between trainer and engines of the same GPUs, in syncs too; 0 where both stay",
        "high: keep one of them, if the Plan says that both fit",
        "lower",
    ),
    Metric("time/checkpoint_s", "s", "the step's checkpoint kept the loop waiting", "high: save less often", "lower"),
    Metric("time/eval_s", "s", "evaluation on held-out prompts", "high: evaluate less often", "lower"),
)

SYSTEM = (
    Metric("system/cpu_fraction", "fraction", "use of all cores of the head node", "at 1: the host is the limit"),
    Metric("system/memory_bytes", "bytes", "most memory in use on the head node", "rising step by step: a leak"),
    Metric("system/disk_free_bytes", "bytes", "free space under the run directory", "near 0: checkpoints will fail"),
    Metric(
        "system/network_sent_bytes_per_s",
        "bytes/s",
        "what the head node sent to other machines",
        "near the link's rate: weight sync waits for it",
    ),
    Metric(
        "system/network_received_bytes_per_s",
        "bytes/s",
        "what the head node received from other machines",
        "high without reason: data or a file system is far away",
    ),
    Metric(
        "system/gpu_use_fraction",
        "fraction",
        "time in which the run's GPUs of the head node ran a kernel, their mean",
        "low: they wait; time/wait_fraction and time/idle_fraction say for whom",
        "higher",
    ),
    Metric(
        "system/gpu_memory_bytes",
        "bytes",
        "most memory taken of one of the run's GPUs of the head node, looked at twice a second",
        "near what the GPU has: the next longer batch fails",
    ),
    Metric(
        "system/gpu_memory_<phase>_bytes",
        "bytes",
        "the same in one phase: rollout, logprobs, train, weight_sync",
        "hold it against the Plan's prediction, as report.html does",
    ),
)

CATALOG: dict[str, tuple[Metric, ...]] = {
    "Reward": REWARD,
    "Evaluation": EVAL,
    "Lengths": LENGTHS,
    "Rollout": ROLLOUT,
    "Staleness": STALENESS,
    "Training": TRAIN,
    "Off-policy and distillation": OFF_POLICY,
    "Critic": CRITIC,
    "Long responses": OVERLONG,
    "Supervised fine-tuning": SFT,
    "Weight sync": WEIGHT_SYNC,
    "Loop": LOOP,
    "System": SYSTEM,
}
"""Title of a group -> its metrics, in the order of docs/metrics.md."""
