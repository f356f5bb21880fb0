"""What a recipe may say, typed, frozen and closed. Owns names, types, ranges; refuses cross-field rules (plan/).

One class a conf/ group. Every field's docstring gives its unit and what it does; `docs/config.md` is made from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NativeOptions = dict[str, Any]
"""An engine's own options under the engine's own names."""


class Section(BaseModel):
    """Base of every part of a recipe: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class ModelShapes(Section):
    """Architecture facts, by Megatron option name."""

    num_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Width of the SwiGLU hidden layer."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt
    """Key and value heads (GQA)."""
    kv_channels: PositiveInt
    """Width of one head."""
    vocab_size: PositiveInt
    """Rows of the embedding, before Megatron's padding."""
    rotary_base: PositiveFloat
    """RoPE theta."""
    norm_epsilon: PositiveFloat
    """RMSNorm epsilon."""
    max_position_embeddings: PositiveInt
    """Longest sequence, tokens."""
    qk_layernorm: bool
    """Whether queries and keys are normalised per head (Qwen3)."""
    add_qkv_bias: bool
    """Whether the query, key and value projections have a bias (Qwen2.5)."""
    untie_embeddings_and_output_weights: bool
    """Whether the output layer has weights of its own."""


class ModelConfig(Section):
    """The trained model (conf/model)."""

    name: str
    """Name in logs and tracking."""
    family: Literal["qwen2", "qwen3", "llama"]
    """HF model_type; names the weight map."""
    path: str | None
    """HF directory (config.json, safetensors, tokenizer). null: random weights of `shapes` are written once per run."""
    shapes: ModelShapes | None
    """Architecture of a model without a path; beside a path it must agree with config.json."""
    alphabet: str | None
    """Characters of the tokenizer made for a model without a path, one token each."""
    init_seed: NonNegativeInt
    """Seed of the random weights of a model without a path."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of weights and activations, in trainer and engines alike."""


class KlConfig(Section):
    """Where the KL to the reference acts."""

    placement: Literal["none", "loss", "reward", "advantage"]
    """none: no reference model is kept. loss: coef x KL joins the loss. reward: coef x KL leaves the reward (of the
    rollout before its group's baseline, or of each token where returns are summed over tokens). advantage: coef x a
    token's own KL leaves its advantage, after the baseline."""
    coef: NonNegativeFloat
    """Weight of the KL; 0 with a placement monitors it."""
    estimator: Literal["k1", "k2", "k3", "k3_clamped", "k1_straight_through"]
    """Schulman's estimators. k1 in the loss has no gradient in expectation and is refused, unless is_unbiased;
    k1_straight_through has k1's value and k2's gradient."""
    is_unbiased: bool
    """Whether a KL in the loss is weighted by exp(logprobs - old_logprobs), with its gradient."""


class OffPolicyConfig(Section):
    """What is done about samples that another policy drew than the one the loss takes for old."""

    correction: Literal[
        "none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "geometric_mis", "icepop", "decoupled"
    ]
    """Weight of a token by w = exp(old_logprobs - rollout_logprobs), over the token, its sequence or their geometric
    mean. tis: clipped to [low, high]. mis, icepop: 0 outside of it. decoupled: at most high; the rollout policy is the
    behaviour, the old one the proximal policy."""
    low: NonNegativeFloat
    """Lower bound of w."""
    high: PositiveFloat
    """Upper bound of w."""
    veto: PositiveFloat | None
    """A sample with a token whose w is below it is left out; null: none is."""
    opsm_delta: PositiveFloat | None
    """Samples with negative advantage that moved further than this (mean old_logprobs - logprobs) are left out."""
    staleness_power: NonNegativeFloat
    """A sample whose weights are a versions old weighs max(a, 1) ** -staleness_power; 0: age does not matter."""


class OverlongConfig(Section):
    """What length does to a rollout (DAPO)."""

    buffer_tokens: NonNegativeInt
    """The reward falls over the last so many tokens before max_new_tokens; 0: it does not."""
    penalty_coef: NonNegativeFloat
    """How far it falls, in units of the reward."""
    should_filter: bool
    """Whether truncated rollouts are left out of baseline and loss; they still count as rollouts."""


class DistillationConfig(Section):
    """On-policy distillation towards a teacher."""

    form: Literal["sampled", "topk"]
    """sampled: coef x (log student - log teacher) of the drawn token leaves its advantage. topk: coef x the KL to the
    teacher over its likeliest tokens and the rest joins the loss."""
    top_k: PositiveInt
    """Tokens of form topk."""

    teacher_path: str | None
    """HF directory of the teacher, of the policy's shapes; the trainer holds its weights. Must be given."""
    coef: PositiveFloat
    """Units of the advantage (sampled) or of the loss (topk) per nat."""
    is_alone: bool
    """Whether rewards are left out: the teacher is all there is to learn from."""


class OptimConfig(Section):
    """Adam and its schedule (conf/optim)."""

    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegativeFloat
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"]
    """Shape of the decay."""
    num_warmup_train_steps: NonNegativeInt
    """Train steps of linear warm-up from 0."""
    adam_beta1: Decay
    """First moment's decay."""
    adam_beta2: Decay
    """Second moment's decay."""
    adam_eps: PositiveFloat
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat
    """Decoupled weight decay."""
    clip_grad: NonNegativeFloat
    """Largest global gradient norm; 0: no clipping."""


class CriticConfig(Section):
    """The value model of PPO: the policy's architecture and layout with a scalar head, trained beside it."""

    path: str | None
    """HF directory its layers start from, of the policy's shapes; null: the policy's. The head starts from the seed."""
    optim: OptimConfig
    """Adam and its schedule; its train steps are all those of the run."""
    num_warmup_steps: NonNegativeInt
    """Steps at the start in which only the critic learns."""
    value_clip: PositiveFloat | None
    """The new value is clipped to the old one +- value_clip, and the larger loss counts; null: no clipping."""


class RlConfig(Section):
    """Reinforcement learning from groups of rollouts (conf/algo, all but sft)."""

    kind: Literal["rl"]
    """rl: rollouts, rewards, a policy loss."""
    name: str
    """Name in logs and in run directories."""
    group_size: PositiveInt
    """Rollouts per prompt."""
    estimator: Literal["group", "returns", "gae"]
    """Advantages. group: the rollout's reward against its group's baseline, the same for all its tokens. returns: the
    discounted sum of token rewards (REINFORCE++). gae: against the critic's values (PPO)."""
    baseline: Literal["group_mean", "leave_one_out", "none"]
    """What a reward is compared with, for estimator group: the group's mean, the mean of the others, or nothing."""
    normalize_std: bool
    """Whether advantages are divided by the group's standard deviation (false: Dr.GRPO's choice)."""
    whiten_advantages: bool
    """Whether advantages get mean 0 and variance 1 over the trained tokens of a train step."""
    gamma: Fraction
    """Discount per trained token, for estimators returns and gae."""
    gae_lambda: Fraction
    """Trace decay of gae: 1 is return minus value, 0 the one-step difference."""
    policy_loss: str
    """clipped, gspo (one ratio a sequence), cispo (clipped weight, no gradient of it), or `module:function` of your
    own."""
    policy_loss_options: dict[str, Any]
    """Keyword arguments of your own policy loss."""
    clip_low: PositiveFloat
    """The ratio is clipped below at 1 - clip_low; 1 or more only for cispo, which then has no lower bound."""
    clip_high: PositiveFloat
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None
    """Upper bound of ratio x |advantage| for negative advantages; null: none."""
    kl: KlConfig
    """KL to the reference."""
    entropy_coef: NonNegativeFloat
    """Weight of the entropy bonus."""
    aggregation: Literal["per_sequence", "per_rollout", "per_prompt", "per_token", "constant"]
    """Mean over samples, rollouts or prompts of their token means; mean over all trained tokens; or mean over rollouts
    of their token sums / aggregation_divisor."""
    aggregation_divisor: PositiveFloat | None
    """Tokens, for aggregation constant; null: rollout.sampling.max_new_tokens."""
    old_logprobs: Literal["recompute", "rollout"]
    """Where the ratio's denominator comes from: the trainer's weights before the update, or the engine. Decoupled PPO
    is recompute with off_policy.correction=decoupled."""
    off_policy: OffPolicyConfig
    """Corrections for the difference between engine and trainer, and for stale samples."""
    overlong: OverlongConfig | None
    """Soft punishment and filtering of long responses; null: none."""
    distillation: DistillationConfig | None
    """A teacher to learn from; null: none."""
    logprob_diff_mean_limit: PositiveFloat | None
    """A step whose mean |logprobs - rollout_logprobs| is larger stops the run; nats; null: it is only measured."""
    logprob_diff_max_limit: PositiveFloat | None
    """The same for the largest one."""
    critic: CriticConfig | None
    """The value model; null: advantages come from groups alone."""


class SftConfig(Section):
    """Supervised fine-tuning on the same trainer (conf/algo/sft.yaml)."""

    kind: Literal["sft"]
    """sft: demonstrations, a log-likelihood loss."""
    name: str
    """Name in logs and in run directories."""
    aggregation: Literal["per_sequence", "per_token"]
    """per_sequence: mean over samples of their token means. per_token: mean over all trained tokens."""


class ServerGroupConfig(Section):
    """Engines of one model with the same worker type and layout."""

    worker_type: Literal["regular"]
    """What the engines do."""
    engine: Literal["embedded", "sglang"]
    """embedded: the CPU server shipped here. sglang: the real one."""
    num_engines: PositiveInt
    """Server processes."""
    gpus_per_engine: PositiveInt
    """Tensor-parallel size of one engine."""
    python: str | None
    """Interpreter whose environment holds the engine; null: the run's own."""
    start_timeout_s: PositiveFloat
    """Longest wait until the engine is healthy."""
    sglang: NativeOptions
    """Options of the server under its own names (underscores for dashes), e.g. max_total_tokens."""
    env: dict[str, str]
    """Environment variables of the engine."""


class ServedModelConfig(Section):
    """One model behind one router."""

    path: str | None
    """HF directory; null: the trained model."""
    is_updated: bool
    """Whether weight syncs reach it."""
    router: NativeOptions
    """Options of sglang-router under its own names, e.g. policy."""
    server_groups: dict[str, ServerGroupConfig]
    """Named groups of engines."""


class TopologyConfig(Section):
    """Who serves what, and where (conf/topology)."""

    device: Literal["cpu", "cuda"]
    """What trainers and engines compute on."""
    placement: Literal["colocated", "disaggregated"]
    """colocated: engines share the trainer's devices. disaggregated: they have their own."""
    served_models: dict[str, ServedModelConfig]
    """Named models; `policy` is the one being trained."""


class ParallelConfig(Section):
    """How the trainer is split (conf/parallel)."""

    tensor_model_parallel_size: PositiveInt
    """TP."""
    pipeline_model_parallel_size: PositiveInt
    """PP."""
    data_parallel_size: PositiveInt
    """DP; ranks = TP x PP x DP."""
    sequence_parallel: bool
    """Whether activations outside attention are split over TP."""
    max_tokens_per_micro_batch: PositiveInt
    """Packed tokens of one micro-batch on one rank; also the longest trainable sample."""
    num_threads: PositiveInt
    """CPU threads of each trainer rank."""
    megatron: NativeOptions
    """Fields of Megatron's TransformerConfig under their own names."""


class TasksConfig(Section):
    """Tasks written by reasoning-gym when the files are absent."""

    datasets: dict[str, dict[str, Any]]
    """reasoning-gym dataset name -> its parameters."""
    num_train_rows: PositiveInt
    """Rows of the training file."""
    num_eval_rows: PositiveInt
    """Rows of the held-out file; no question stands in both."""
    seed: NonNegativeInt
    """Seed of the task generator."""
    prompt_template: str
    """How a question is put; {question} stands for it."""
    response_template: str
    """The answer written for SFT; {answer} stands for it."""


class DataConfig(Section):
    """Prompts (conf/data)."""

    name: str
    """Name in metrics."""
    train_path: str
    """JSONL of training prompts."""
    max_train_rows: PositiveInt | None
    """Only the first so many rows of train_path; null: all."""
    eval_path: str | None
    """JSONL of held-out prompts; null: no evaluation."""
    prompt_key: str
    """Key of the prompt: a string, or chat messages."""
    label_key: str
    """Key of what a verifier compares with."""
    metadata_key: str
    """Key of whatever else the reward needs."""
    response_key: str
    """Key of the response to imitate (SFT)."""
    apply_chat_template: bool
    """Whether prompts go through the tokenizer's chat template."""
    should_shuffle: bool
    """Whether each epoch is shuffled, by the run's seed."""
    max_prompt_tokens: PositiveInt
    """A longer prompt is an error."""
    tasks: TasksConfig | None
    """Generates both files when absent; null: the files must exist."""


class RewardConfig(Section):
    """What a rollout is worth (conf/reward)."""

    name: str
    """A verifier's name, or `module:function` of your own."""
    options: dict[str, Any]
    """Its keyword arguments."""
    timeout_s: PositiveFloat
    """Longest time for one rollout; then it counts as failed."""


class SamplingConfig(Section):
    """How engines sample; every field is sent with every request."""

    temperature: NonNegativeFloat
    """Divides the logits; 0 is greedy (evaluation only)."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Nucleus; 1 keeps all."""
    top_k: int
    """Most likely tokens kept; -1 keeps all."""
    max_new_tokens: PositiveInt
    """Longest response, tokens."""
    min_new_tokens: NonNegativeInt
    """No stop before so many tokens."""
    stop: tuple[str, ...]
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end it."""
    ignore_eos: bool
    """Whether the end-of-sequence token does not."""


class EvaluationConfig(Section):
    """Held-out evaluation."""

    num_prompts: PositiveInt
    """The first so many rows of data.eval_path."""
    num_samples_per_prompt: PositiveInt
    """Rollouts per prompt; above 1 also gives pass@k."""
    sampling: SamplingConfig
    """How evaluation samples."""


class RolloutConfig(Section):
    """How prompts become groups (conf/rollout)."""

    sampling: SamplingConfig
    """How training rollouts sample."""
    evaluation: EvaluationConfig
    """How the held-out set is measured."""
    max_concurrent_requests: PositiveInt
    """Requests in flight at once, over all engines."""
    request_timeout_s: PositiveFloat
    """Longest time for one request."""
    filters: tuple[Literal["nonzero_variance"], ...]
    """Groups to drop and replace; each drop is counted."""
    max_failed_fraction: Fraction
    """More failed rollouts than this in a step stop the run."""


class ScheduleConfig(Section):
    """How long, and how often what (conf/schedule)."""

    num_steps: PositiveInt
    """Steps of the run."""
    prompts_per_step: PositiveInt
    """Prompts collected per step (SFT: samples)."""
    num_train_steps: PositiveInt
    """Optimizer updates per step; must divide prompts_per_step."""
    eval_interval: NonNegativeInt
    """Steps between evaluations; 0: only before and after."""
    should_eval_before: bool
    """Whether to evaluate before the first step."""
    save_interval: PositiveInt
    """Steps between checkpoints; the last step always saves."""
    num_kept_checkpoints: PositiveInt
    """Older ones are removed."""
    should_export_hf: bool
    """Whether the end writes an HF directory, <run_dir>/hf."""


class WeightSyncConfig(Section):
    """How weights reach the engines (conf/weight_sync)."""

    transport: Literal["tensor", "distributed", "disk"]
    """tensor: shared memory of one host. distributed: a process group. disk: an HF directory both see."""
    bucket_bytes: PositiveInt
    """Most bytes of one message."""
    pause_mode: Literal["abort", "in_place"]
    """What a sync does to running requests. abort: they end with what they have. in_place: they go on afterwards, with
    the prefix cache of the old weights. SGLang's third, retract, is left out: its cache cannot be flushed then."""
    verify_interval: NonNegativeInt
    """Syncs between checksum comparisons of every tensor, trainer against engine; 0: never."""
    timeout_s: PositiveFloat
    """Longest time for one sync."""


class TrackingConfig(Section):
    """Where metrics go beside <run_dir>/metrics.jsonl (conf/tracking)."""

    is_mlflow_enabled: bool
    """Whether MLflow gets them too."""
    tracking_uri: str | None
    """MLflow server; null: sqlite in runs_dir."""
    experiment: str
    """MLflow experiment."""


class RunConfig(Section):
    """A whole recipe."""

    name: str
    """Name of the run; also of its directory."""
    seed: NonNegativeInt
    """Seed of shuffling and sampling."""
    deterministic: bool
    """Whether a rerun gives the same numbers bit for bit (CPU, same layout); slower."""
    runs_dir: str
    """Where run directories and the MLflow file live."""
    run_dir: str
    """Directory of this run; a run that finds its checkpoint there resumes."""
    resume: Literal["auto", "never", "required", "accept_changes"]
    """auto: from the run directory when it holds a checkpoint of the same recipe. never: refuse a used directory.
    required: refuse an unused one. accept_changes: resume although the recipe changed."""
    model: ModelConfig
    algo: Annotated[RlConfig | SftConfig, Field(discriminator="kind")]
    topology: TopologyConfig
    parallel: ParallelConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    schedule: ScheduleConfig
    weight_sync: WeightSyncConfig
    optim: OptimConfig
    tracking: TrackingConfig
