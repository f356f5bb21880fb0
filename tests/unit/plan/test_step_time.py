"""Predicted steps: arithmetic by hand, limits, directions, and what was measured on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from step_recipes import APART, COLOCATED, CONSTANTS, LONG, MAIN, inputs_of, maybe_inputs_of, with_constants, with_gpu

from rlrecipes.plan.engine_costs import compute_decode_costs
from rlrecipes.plan.lengths import LengthDistribution, draw_lengths
from rlrecipes.plan.parameters import compute_num_active_parameters
from rlrecipes.plan.passes import find_logprob_passes
from rlrecipes.plan.rollout_time import compute_distribution, compute_limits, compute_rollout_time
from rlrecipes.plan.simulation import Request, simulate
from rlrecipes.plan.step_time import WORDS, compute_step_time
from rlrecipes.plan.sync_time import compute_checkpoint_time, compute_offload_time, compute_sync_time
from rlrecipes.plan.train_time import compute_train_time

PD = (*APART, "topology=pd")
MOE = (
    "model=qwen3_30b_a3b",
    "topology=colocated",
    "cluster=h200_8",
    "parallel.tensor_model_parallel_size=4",
    "parallel.data_parallel_size=2",
    f"{MAIN}.gpus_per_engine=4",
    *LONG,
)
PIPELINE = (
    *APART,
    "parallel.data_parallel_size=1",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.tensor_model_parallel_size=2",
    "parallel.context_parallel_size=2",
)
CASES = {"colocated": COLOCATED, "apart": APART, "pd": PD, "moe": MOE, "pipeline": PIPELINE}
SMOLLM = (  # SmolLM2-135M: 134.5 million parameters
    "model=llama3_2_3b",
    "topology=colocated",
    "cluster=h200_1",
    "model.shapes.num_layers=30",
    "model.shapes.hidden_size=576",
    "model.shapes.ffn_hidden_size=1536",
    "model.shapes.num_attention_heads=9",
    "model.shapes.num_query_groups=3",
    "model.shapes.kv_channels=64",
    "model.shapes.vocab_size=49152",
)


def step_of(*overrides, constants=CONSTANTS):
    return compute_step_time(inputs_of(*overrides), constants)


@pytest.mark.parametrize("case", CASES)
def test_phases_and_parts_add_up(case):
    step = step_of(*CASES[case])
    phases = (step.rollout_s, step.logprobs_s, step.train_s, step.weight_sync_s, step.offload_s)
    assert step.step_s == pytest.approx(sum(phases))
    sums = {"rollout": 0.0, "train": 0.0, "sync": 0.0, "offload": 0.0}
    for name, seconds in step.parts.items():
        sums[name.partition(".")[0]] += seconds
    assert sums["rollout"] == pytest.approx(step.rollout_s)
    assert sums["train"] == pytest.approx(step.logprobs_s + step.train_s)
    assert sums["sync"] == pytest.approx(step.weight_sync_s)
    assert sums["offload"] == pytest.approx(step.offload_s)
    assert set(step.parts) <= set(WORDS)
    assert step.gpu_s == pytest.approx(step.step_s * step.num_gpus)
    assert all(0 <= role.idle_fraction <= 1 for role in step.roles)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("figure", ["hbm_bytes_per_s", "nvlink_bytes_per_s", "bf16_flops_per_s"])
def test_a_faster_gpu_is_never_slower(case, figure):
    inputs = inputs_of(*CASES[case])
    steps = [
        compute_step_time(with_gpu(inputs, **{figure: getattr(inputs.gpu, figure) * factor}), CONSTANTS)
        for factor in (0.25, 1.0, 4.0)
    ]
    for slow, fast in zip(steps, steps[1:], strict=False):
        for phase in ("rollout_s", "logprobs_s", "train_s", "weight_sync_s", "step_s"):
            assert getattr(fast, phase) <= getattr(slow, phase) * (1 + 1e-9)
    assert steps[2].step_s < steps[0].step_s or figure == "nvlink_bytes_per_s"


def test_a_faster_network_is_never_slower_and_helps_where_it_is_used():
    inputs = inputs_of(*APART)
    faster = dataclasses.replace(inputs, nic_bytes_per_s=2 * inputs.nic_bytes_per_s)
    slow, fast = compute_step_time(inputs, CONSTANTS), compute_step_time(faster, CONSTANTS)
    assert fast.parts["sync.transfer"] == pytest.approx(slow.parts["sync.transfer"] / 2)
    assert fast.step_s < slow.step_s


@pytest.mark.parametrize("case", CASES)
def test_longer_answers_and_more_prompts_take_longer(case):
    base = step_of(*CASES[case])
    longer = step_of(*CASES[case], "rollout.sampling.max_new_tokens=12000")
    more = step_of(*CASES[case], "schedule.prompts_per_step=256")
    for step in (longer, more):
        assert step.rollout_s > base.rollout_s
        assert step.train_s > base.train_s
    assert more.samples_per_s > base.samples_per_s  # larger batches use the weights that are read better


def test_weights_of_a_decode_step_are_read_once_over_the_bandwidth():
    """Llama-3.1-8B: 8.03e9 parameters, of which the lookup's 128256 x 4096 are not read; 2 bytes each."""
    inputs = inputs_of("model=llama3_1_8b", "topology=colocated", "cluster=h200_8", f"{MAIN}.gpus_per_engine=2")
    (group,) = inputs.engine_groups
    costs = compute_decode_costs(inputs, group, compute_distribution(inputs, CONSTANTS), CONSTANTS)
    num_read = 8_030_261_248 - 128_256 * 4096
    assert costs.weights_s == pytest.approx(num_read * 2 / 2 / (4.8e12 * CONSTANTS.decode_bandwidth_fraction))
    # 32 layers x 2 x 4 of 8 key/value heads x 128 x 2 bytes
    assert costs.context_s == pytest.approx(32 * 2 * 4 * 128 * 2 / (4.8e12 * CONSTANTS.decode_bandwidth_fraction))
    # 64 all-reduces of 4096 bf16 values, each half of them there and back
    assert costs.token_link_s == pytest.approx(64 * 4096 * 2 / (4.5e11 * CONSTANTS.nvlink_fraction))


def test_the_kv_cache_holds_what_memory_leaves():
    inputs = inputs_of(
        "model=llama3_1_8b", "topology=colocated", "cluster=h200_1", f"{MAIN}.sglang.mem_fraction_static=0.5"
    )
    (group,) = inputs.engine_groups
    expected = (0.5 * 150109880320 - 8_030_261_248 * 2) / (32 * 2 * 8 * 128 * 2)
    limits = compute_limits(inputs, group, 1)
    assert limits.capacity_tokens == int(expected)
    assert limits.max_running == 256  # rollout.max_concurrent_requests


@pytest.mark.parametrize(("num_requests", "measured"), [(1, 696), (64, 31347), (256, 72902)])
def test_decoding_as_measured_on_an_h200(num_requests, measured):
    """SGLang 0.5.17, SmolLM2-135M bf16, prompts of 32 and answers of 512 tokens: the constants' own source, to 10%."""
    inputs = inputs_of(*SMOLLM)
    (group,) = inputs.engine_groups
    costs = compute_decode_costs(inputs, group, LengthDistribution(512, 0.0, 512, 32), CONSTANTS)
    run = simulate([Request(32, 512, 32, 32)] * num_requests, costs, max_running=512, capacity_tokens=10**7)
    assert num_requests * 512 / run.end_s == pytest.approx(measured, rel=0.1)


def test_decoding_on_two_gpus_as_measured():
    """A random model of 352 million parameters, TP 2, another machine: 439 tokens/s at 1 and 18600 at 64 requests.

    Not what the constants are from, and hosts differ in speed: held to a factor of 1.8.
    """
    inputs = inputs_of(
        *SMOLLM,
        "cluster=h200_2",
        "model.shapes.num_layers=24",
        "model.shapes.hidden_size=1024",
        "model.shapes.ffn_hidden_size=3072",
        "model.shapes.num_attention_heads=16",
        "model.shapes.num_query_groups=8",
        f"{MAIN}.gpus_per_engine=2",
        "parallel.tensor_model_parallel_size=2",
    )
    (group,) = inputs.engine_groups
    costs = compute_decode_costs(inputs, group, LengthDistribution(256, 0.0, 256, 32), CONSTANTS)
    for num_requests, measured in ((1, 439), (64, 18600)):
        run = simulate([Request(32, 256, 32, 32)] * num_requests, costs, max_running=512, capacity_tokens=10**7)
        assert 1 / 1.8 < num_requests * 256 / run.end_s / measured < 1.8


def test_a_train_step_as_measured_on_an_h200():
    """Megatron-Core, local layers, 24 x 1024, 8 x 1024 tokens, 478 million parameters: 158 ms (158 to 166), to 15%."""
    inputs = inputs_of(
        *SMOLLM,
        "model.shapes.num_layers=24",
        "model.shapes.hidden_size=1024",
        "model.shapes.ffn_hidden_size=4096",
        "model.shapes.num_attention_heads=16",
        "model.shapes.num_query_groups=8",
        "model.shapes.untie_embeddings_and_output_weights=true",
        "schedule.prompts_per_step=1",
        "algo.group_size=8",
        "parallel.max_tokens_per_micro_batch=16384",
    )
    train = compute_train_time(inputs, CONSTANTS, LengthDistribution(1015, 0.0, 1015, 9))
    assert train.num_micro_batches == 1
    assert train.train_s == pytest.approx(0.158, rel=0.15)


def test_training_computes_six_operations_a_parameter_and_token():
    """Qwen3-4B on one GPU, nothing but arithmetic: 4.02e9 parameters, embedding tied; 36 layers, 32 heads of 128."""
    inputs = inputs_of(*COLOCATED, "parallel.data_parallel_size=1")
    free = with_constants(
        layer_launch_s=0.0, logprob_bytes_per_logit=0.0, attention_flops_fraction=CONSTANTS.train_flops_fraction
    )
    distribution = compute_distribution(inputs, free)
    train = compute_train_time(inputs, free, distribution)
    lengths = [256 + n for n in draw_lengths(distribution, 512, 0)]
    flops = 6 * 4_022_468_096 * sum(lengths)
    flops += (
        6 * 36 * 32 * 128 * sum(n * n for n in lengths)
    )  # 3 x 2 x (query-key and attention-value), half of it causal
    assert train.parts["compute"] == pytest.approx(flops / (989e12 * CONSTANTS.train_flops_fraction), rel=1e-3)


def test_the_pipeline_bubble_is_stages_over_micro_batches():
    one = step_of(*PIPELINE)
    busy = one.parts["train.compute"] + one.parts["train.launch"] + one.parts["train.exchange"]
    assert one.parts["train.bubble"] == pytest.approx(busy / one.num_micro_batches)
    vpp = step_of(*PIPELINE, "parallel.virtual_pipeline_model_parallel_size=2")
    busy = vpp.parts["train.compute"] + vpp.parts["train.launch"] + vpp.parts["train.exchange"]
    assert vpp.num_micro_batches % 2 == 0
    assert vpp.parts["train.bubble"] == pytest.approx(busy / vpp.num_micro_batches / 2)


def test_recomputing_whole_layers_costs_a_third_of_their_arithmetic():
    base = step_of(*COLOCATED, constants=with_constants(layer_launch_s=0.0, logprob_bytes_per_logit=0.0))
    full = [
        "parallel.recompute_granularity=full",
        "parallel.recompute_method=uniform",
        "parallel.recompute_num_layers=1",
    ]
    constants = with_constants(layer_launch_s=0.0, logprob_bytes_per_logit=0.0)
    recomputed = step_of(*COLOCATED, *full, constants=constants)
    ratio = recomputed.parts["train.compute"] / base.parts["train.compute"]
    assert 1.25 < ratio < 4 / 3  # the head is not recomputed
    selective = step_of(*COLOCATED, "parallel.recompute_granularity=selective", constants=constants)
    assert base.train_s < selective.train_s < recomputed.train_s


def test_a_group_that_crosses_nodes_pays_for_the_network():
    layout = ("parallel.tensor_model_parallel_size=8", "parallel.data_parallel_size=1")
    wide = ("parallel.tensor_model_parallel_size=16", "parallel.data_parallel_size=1")
    constants = with_constants(layer_launch_s=0.0)
    base = ("model=qwen3_32b", "topology=colocated", "cluster=h100_8x4", *LONG, f"{MAIN}.gpus_per_engine=8")
    inside = step_of(*base, *layout, constants=constants)
    across = step_of(*base, *wide, constants=constants)
    assert across.parts["train.exchange"] > inside.parts["train.exchange"]
    faster = dataclasses.replace(inputs_of(*base, *wide), nic_bytes_per_s=1e12)
    assert compute_step_time(faster, constants).parts["train.exchange"] < across.parts["train.exchange"]


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (["algo=grpo"], ()),
        (["algo=grpo", "schedule.num_train_steps=2"], ("policy",)),
        (["algo=grpo", "schedule.num_train_steps=2", "algo.old_logprobs=rollout"], ()),
        (["algo=grpo", "algo.kl.placement=loss", "algo.kl.coef=0.1"], ("reference",)),
        (["algo=grpo", "algo.kl.placement=reward", "algo.kl.coef=0.1"], ("policy", "reference")),
        (["algo=ppo"], ("critic",)),
        (["algo=opd", "algo.kl.placement=none"], ("policy", "teacher")),
    ],
)
def test_passes_before_a_train_step(overrides, passes):
    from rlrecipes.config.compose import compose

    config = compose(overrides).config
    found = find_logprob_passes(config.algo, config.schedule.num_train_steps)
    extra = ("reference",) if config.algo.kl.placement != "none" else ()
    assert set(found) == set(passes) | set(extra)


def test_each_pass_costs_a_forward_pass():
    """A third of forward and backward, where nothing else counts."""
    constants = with_constants(packing_fraction=0.95)
    base = step_of(*COLOCATED, constants=constants)
    read = step_of(*COLOCATED, "algo.kl.placement=loss", "algo.kl.coef=0.1", constants=constants)
    assert base.logprobs_s == 0
    both = sum(base.parts[f"train.{name}"] for name in ("compute", "launch", "exchange"))
    assert read.logprobs_s == pytest.approx(both / 3, rel=1e-6)
    assert read.train_s == base.train_s


def test_a_critic_reads_and_trains_too():
    policy, both = step_of(*COLOCATED), step_of(*COLOCATED, "algo=ppo", "algo.group_size=8")
    assert both.train_s == pytest.approx(2 * policy.train_s)
    assert both.logprobs_s > 0


def test_weights_travel_over_the_slowest_link_between_trainer_and_engines():
    num_bytes = 2 * 4_022_468_096
    apart = compute_sync_time(inputs_of(*APART), CONSTANTS)
    assert apart["transfer"] == pytest.approx(num_bytes / (5e10 * CONSTANTS.sync_link_fraction))
    near = inputs_of(*APART, "cluster=h200_8", "parallel.data_parallel_size=4")
    inside = compute_sync_time(near, CONSTANTS)
    assert inside["transfer"] == pytest.approx(num_bytes / (4.5e11 * CONSTANTS.sync_link_fraction))
    disk = compute_sync_time(inputs_of(*APART, "weight_sync=disk"), CONSTANTS)
    assert disk["transfer"] == pytest.approx(2 * num_bytes / CONSTANTS.disk_bytes_per_s)
    assert disk["buckets"] == 0
    verified = compute_sync_time(inputs_of(*APART, "weight_sync.verify_interval=4"), CONSTANTS)
    assert verified["verify"] == pytest.approx(apart["verify"] / 4)
    unverified = compute_sync_time(inputs_of(*APART, "weight_sync.verify_interval=0"), CONSTANTS)
    assert unverified["verify"] == 0
    assert compute_sync_time(inputs_of(*APART, f"{MAIN}.gpus_per_engine=2"), CONSTANTS)["verify"] == 0  # shards


def test_a_bucket_over_cuda_ipc_as_measured_on_an_h200():
    """270 MB in 18 to 19 ms, the constants' own source, to 20%."""
    inputs = inputs_of(*SMOLLM, "weight_sync.bucket_bytes=300000000")
    sync = compute_sync_time(inputs, CONSTANTS)
    assert sync["transfer"] + sync["buckets"] == pytest.approx(0.0185, rel=0.2)


def test_memory_changes_hands_only_between_those_that_share_gpus():
    colocated = inputs_of(*COLOCATED)
    # a rank of DP 8: weights, and an eighth of 12 bytes of state, there and back
    state = 4_022_468_096 * (2 + 12 / 8)
    expected = CONSTANTS.engine_release_s + 2 * state / CONSTANTS.host_link_bytes_per_s
    assert compute_offload_time(colocated, CONSTANTS) == pytest.approx(expected, rel=0.01)
    assert compute_offload_time(inputs_of(*APART), CONSTANTS) == 0


def test_a_critic_goes_where_the_policy_goes():
    """Of a model with tied weights both have the same parameters."""
    alone, both = (inputs_of(*COLOCATED, *more) for more in ((), ("algo=ppo",)))
    release_s = CONSTANTS.engine_release_s
    one_s, two_s = (compute_offload_time(inputs, CONSTANTS) - release_s for inputs in (alone, both))
    assert two_s == pytest.approx(2 * one_s)
    assert compute_checkpoint_time(both, CONSTANTS) == 2 * compute_checkpoint_time(alone, CONSTANTS)


def test_engines_stand_still_while_the_trainer_works_and_the_other_way_round():
    step = step_of(*APART)
    trainer, engines = step.roles
    assert (trainer.num_gpus, engines.num_gpus, step.num_gpus) == (8, 8, 16)
    assert trainer.idle_fraction == pytest.approx(step.rollout_s / step.step_s)
    assert engines.idle_fraction > (step.train_s + step.logprobs_s) / step.step_s - 1e-9
    assert step_of(*COLOCATED).num_gpus == 8


def test_the_tail_grows_with_the_spread_of_lengths():
    narrow = step_of(*COLOCATED, constants=with_constants(response_sigma=0.1))
    wide = step_of(*COLOCATED, constants=with_constants(response_sigma=0.7))
    assert wide.rollout_tail_s / wide.rollout_s > narrow.rollout_tail_s / narrow.rollout_s


def test_prefill_engines_keep_prompts_out_of_decoding():
    step = step_of(*PD)
    assert step.parts["rollout.prefill"] == 0
    assert step.parts["rollout.waiting"] > 0
    assert {group.worker_type for group in inputs_of(*PD).engine_groups} == {"prefill", "decode"}


def test_the_heaviest_engine_decides():
    """Every engine simulated: none takes longer than the three that stand for all."""
    inputs = inputs_of(*APART, "schedule.prompts_per_step=40")
    (group,) = inputs.engine_groups
    distribution = compute_distribution(inputs, CONSTANTS)
    costs = compute_decode_costs(inputs, group, distribution, CONSTANTS)
    limits = compute_limits(inputs, group, 8)
    lengths = draw_lengths(distribution, 40 * 8, inputs.seed)
    ends = []
    for engine in range(8):
        requests = [
            Request(256, tokens, 256 if not sibling else 0, 256 if not sibling else 0)
            for prompt in range(engine, 40, 8)
            for sibling, tokens in enumerate(lengths[prompt * 8 : prompt * 8 + 8])
        ]
        run = simulate(requests, costs, max_running=limits.max_running, capacity_tokens=limits.capacity_tokens)
        ends.append(run.end_s)
    assert compute_rollout_time(inputs, CONSTANTS).duration_s == pytest.approx(max(ends), rel=0.02)


def test_fp8_weights_and_cache_are_half_as_many_bytes():
    inputs = inputs_of(*COLOCATED)
    half = inputs_of(*COLOCATED, f"+{MAIN}.sglang.quantization=fp8", f"+{MAIN}.sglang.kv_cache_dtype=fp8_e4m3")
    distribution = compute_distribution(inputs, CONSTANTS)
    costs, fewer = (
        compute_decode_costs(each, each.engine_groups[0], distribution, CONSTANTS) for each in (inputs, half)
    )
    assert fewer.weights_s == pytest.approx(costs.weights_s / 2)
    assert fewer.context_s == pytest.approx(costs.context_s / 2)


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe=quickstart_sft"],
        ["topology=embedded"],
        ["model=qwen3_4b", "topology=colocated", "cluster=h200_8", "gpu@cluster.gpu=null", "cluster.gpu=null"],
        ["model=qwen3_4b", "topology=router_only", "cluster=h200_8"],
        ["model=qwen3_4b", "topology=external", "cluster=h200_8", f"{MAIN}.urls=[http://a:1]"],
    ],
)
def test_nothing_is_said_without_gpus_or_without_engines_of_ones_own(overrides):
    overrides = [word for word in overrides if not word.startswith("gpu@")]
    assert maybe_inputs_of(*overrides) is None


def test_demonstrations_have_no_rollouts():
    step = step_of(*COLOCATED, "algo=sft")
    assert (step.rollout_s, step.logprobs_s, step.weight_sync_s, step.offload_s) == (0, 0, 0, 0)
    assert step.train_s > 0
    assert [role.role for role in step.roles] == ["trainer"]


def test_engines_without_memory_are_paused_already():
    asleep, awake, apart = (
        inputs_of(*words) for words in (COLOCATED, (*COLOCATED, "topology.should_offload_engines=false"), APART)
    )
    assert compute_sync_time(asleep, CONSTANTS)["pause"] == 0
    for inputs in (awake, apart):
        assert compute_sync_time(inputs, CONSTANTS)["pause"] == CONSTANTS.pause_abort_s


def test_the_same_recipe_gives_the_same_prediction():
    first = step_of(*PD)
    assert compute_step_time(inputs_of(*PD), CONSTANTS) == first


def test_the_bottleneck_is_named_in_words():
    assert "rollout is" in step_of(*COLOCATED).bottleneck
    slow = with_constants(pause_abort_s=1e4)
    assert "pause_mode=in_place" in step_of(*APART, constants=slow).bottleneck
    assert "larger micro-batches" in step_of(*COLOCATED, constants=with_constants(layer_launch_s=10.0)).bottleneck


FAMILIES = sorted(file.stem for file in (Path(__file__).parents[3] / "conf" / "model").glob("*.yaml"))


@pytest.mark.parametrize("model", [name for name in FAMILIES if name not in ("hf", "qwen3_tiny")])
def test_every_family_has_a_time(model):
    inputs = inputs_of(
        *COLOCATED, f"model={model}", f"{MAIN}.gpus_per_engine=8", "rollout.sampling.max_new_tokens=2048"
    )
    step = compute_step_time(inputs, CONSTANTS)
    assert min(step.rollout_s, step.train_s, step.weight_sync_s) > 0
    assert step.longest_tokens_per_s < 1 / CONSTANTS.decode_step_s
    # at least its weights' operations at the peak rate
    least = (
        3 * 2 * compute_num_active_parameters(inputs.shapes) * inputs.num_samples / (8 * inputs.gpu.bf16_flops_per_s)
    )
    assert step.train_s > least * step.response_tokens_mean * 0.9


def test_a_token_of_many_experts_costs_what_it_visits():
    """Qwen3-30B-A3B has 3.3e9 active parameters of 30.5e9: it trains nearer to a model of 4e9 than to one of 32e9."""
    small, sparse, large = (
        step_of(*COLOCATED, f"model={model}", f"{MAIN}.gpus_per_engine=4").parts["train.compute"]
        for model in ("qwen3_4b", "qwen3_30b_a3b", "qwen3_32b")
    )
    assert small / 2 < sparse < 2 * small < large
