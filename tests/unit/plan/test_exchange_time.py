"""Bytes between ranks, engines and hosts, each by hand: what is sent, over what, and what hides it."""

from __future__ import annotations

import dataclasses

import pytest
from step_recipes import APART, COLOCATED, CONSTANTS, LONG, MAIN, inputs_of, with_constants

from rlrecipes.plan.engine_costs import compute_decode_costs
from rlrecipes.plan.rollout_time import compute_distribution, compute_rollout_time
from rlrecipes.plan.step_time import compute_step_time
from rlrecipes.plan.train_time import compute_train_time

NUM_PARAMETERS = 4_022_468_096  # Qwen3-4B; its vocabulary of 151936 needs no padding
MOE = ("model=qwen3_30b_a3b", "topology=colocated", "cluster=h100_8x2", *LONG, f"{MAIN}.gpus_per_engine=8")


def train_of(*overrides, constants=CONSTANTS):
    inputs = inputs_of(*overrides)
    return compute_train_time(inputs, constants, compute_distribution(inputs, constants))


def costs_of(*overrides, constants=CONSTANTS):
    inputs = inputs_of(*overrides)
    (group, *_) = inputs.engine_groups
    return compute_decode_costs(inputs, group, compute_distribution(inputs, constants), constants)


def test_gradients_are_summed_in_fp32_and_weights_gathered():
    """4 + 2 bytes a parameter; 7 of 8 parts travel."""
    moved = 6 * NUM_PARAMETERS * 7 / 8
    inside = train_of(*COLOCATED).parts["reduction"]
    assert inside == pytest.approx(moved / (4.5e11 * CONSTANTS.nvlink_fraction))
    # 8 network cards of a node together are slower than NVLink's share of 0.8 x 450 GB/s
    across = train_of(*APART, "cluster=h100_8x4", "parallel.data_parallel_size=16").parts["reduction"]
    moved = 6 * NUM_PARAMETERS * 15 / 16
    assert across == pytest.approx(moved / (8 * 5e10 * CONSTANTS.nic_fraction))


def test_one_rank_of_a_group_on_a_node_has_one_network_card():
    """TP 8 fills a node: of each DP group one rank is on it."""
    layout = ("cluster=h100_8x4", "parallel.tensor_model_parallel_size=8", "parallel.data_parallel_size=2")
    found = train_of(*APART, *layout).parts["reduction"]
    num_whole = 36 * (2 * 2560 + 2 * 128) + 2560  # norms
    moved = 6 * ((NUM_PARAMETERS - num_whole) / 8 + num_whole) / 2
    assert found == pytest.approx(moved / (5e10 * CONSTANTS.nic_fraction), rel=1e-4)


def test_gradients_hide_behind_the_last_backward_pass_where_asked():
    layout = ("cluster=h100_8x4", "parallel.tensor_model_parallel_size=8", "parallel.data_parallel_size=2")
    hidden = train_of(*APART, *layout, "+parallel.megatron.overlap_grad_reduce=true").parts["reduction"]
    assert hidden < train_of(*APART, *layout).parts["reduction"]


def test_adam_on_the_host_waits_for_the_link_and_for_the_hosts_memory():
    own = NUM_PARAMETERS / 8
    gpu = train_of(*COLOCATED).parts["optimizer"]
    assert gpu == pytest.approx(30 * own / (4.8e12 * CONSTANTS.optimizer_bandwidth_fraction))
    host = train_of(*COLOCATED, "parallel.optimizer_cpu_offload=true").parts["optimizer"]
    expected = 6 * own / CONSTANTS.host_link_bytes_per_s + 8 * 28 * own / CONSTANTS.host_memory_bytes_per_s
    assert host == pytest.approx(expected)
    half = ("parallel.optimizer_cpu_offload=true", "+parallel.megatron.optimizer_offload_fraction=0.5")
    assert train_of(*COLOCATED, *half).parts["optimizer"] == pytest.approx((gpu + host) / 2)


def exchange_s(*overrides, **constants):
    """Of one micro-batch's forward pass, per token of it on one rank."""
    inputs = inputs_of(*overrides)
    free = with_constants(collective_s=1e-15, packing_fraction=1.0, **constants)
    distribution = compute_distribution(inputs, free)
    train = compute_train_time(inputs, free, distribution)
    parallel = inputs.parallel
    tokens = inputs.num_samples * (distribution.prompt_tokens + distribution.mean_tokens)
    per_rank = tokens / parallel.data_parallel_size / parallel.context_parallel_size
    return train.parts["exchange"] / per_rank / 2  # forward, and backward once more


def test_tensor_parallel_ranks_sum_their_activations_twice_a_layer():
    found = exchange_s(*COLOCATED, "parallel.tensor_model_parallel_size=4", "parallel.data_parallel_size=2")
    sent = 36 * 2 * 2560 * 2 * 2 * 3 / 4
    assert found == pytest.approx(sent / (4.5e11 * CONSTANTS.nvlink_fraction), rel=0.01)


def test_context_parallel_ranks_pass_keys_and_values_around():
    found = exchange_s(*COLOCATED, "parallel.context_parallel_size=4", "parallel.data_parallel_size=2")
    sent = 36 * 3 * 2 * 8 * 128 * 2  # to three others: keys and values of 8 heads
    assert found == pytest.approx(sent / (4.5e11 * CONSTANTS.nvlink_fraction), rel=0.01)


def test_expert_parallel_ranks_send_tokens_there_and_back():
    layout = ("parallel.data_parallel_size=8", "parallel.expert_model_parallel_size=8")
    found = exchange_s(*MOE, *layout)
    sent = 48 * 2 * 8 * 2048 * 2 * 7 / 8  # 8 experts a token
    assert found == pytest.approx(sent / (4.5e11 * CONSTANTS.expert_exchange_fraction), rel=0.01)


def test_stages_hand_activations_on():
    found = exchange_s(*COLOCATED, "parallel.pipeline_model_parallel_size=2", "parallel.data_parallel_size=4")
    assert found == pytest.approx(2560 * 2 / (4.5e11 * CONSTANTS.nvlink_fraction), rel=0.01)


def test_an_engine_with_stages_passes_through_all_of_them_a_step():
    flat = costs_of(*COLOCATED, f"{MAIN}.gpus_per_engine=2")
    staged = costs_of(*COLOCATED, f"{MAIN}.gpus_per_engine=2", f"{MAIN}.pipeline_parallel_size=2")
    assert staged.weights_s == pytest.approx(2 * flat.weights_s)  # TP 1: twice as much a stage, in two stages
    assert staged.step_s == pytest.approx(2 * CONSTANTS.decode_step_s)
    assert staged.context_s == pytest.approx(flat.context_s)
    assert staged.token_link_s == 0 < flat.token_link_s


def test_attention_replicas_hold_all_heads_and_a_part_of_the_requests():
    flat = costs_of(*COLOCATED, f"{MAIN}.gpus_per_engine=4")
    replicas = costs_of(*COLOCATED, f"{MAIN}.gpus_per_engine=4", f"{MAIN}.attention_data_parallel_size=4")
    assert replicas.weights_s == pytest.approx(4 * flat.weights_s)
    assert replicas.context_s == pytest.approx(flat.context_s)


def test_speculation_gains_tokens_and_costs_time_a_step():
    plain = costs_of(*COLOCATED)
    drafted = costs_of(*COLOCATED, f"+{MAIN}.sglang.speculative_algorithm=EAGLE")
    assert drafted.tokens_per_step == CONSTANTS.speculative_tokens
    assert drafted.step_s == pytest.approx(plain.step_s * CONSTANTS.speculative_step_factor)
    assert drafted.prefill_token_s == plain.prefill_token_s


def test_siblings_share_their_prompts_room():
    """A cache that holds the answers of a group and its prompt once serves it at once."""
    words = (*COLOCATED, "schedule.prompts_per_step=8", f"+{MAIN}.sglang.max_total_tokens=")
    constants = with_constants(response_sigma=1e-9, prompt_fraction=1.0)  # 8 answers of 2048 after 1024 tokens
    roomy = compute_rollout_time(inputs_of(*words[:-1], words[-1] + str(8 * 2048 + 1024)), constants)
    tight = compute_rollout_time(inputs_of(*words[:-1], words[-1] + str(8 * 2048 + 1023)), constants)
    assert tight.duration_s > 1.5 * roomy.duration_s


def test_a_slow_link_holds_prompts_back_from_decode_engines():
    inputs = inputs_of(*APART, "topology=pd", "cluster=h100_8x4")
    slow = dataclasses.replace(inputs, nic_bytes_per_s=inputs.nic_bytes_per_s / 1000)
    waiting, longer = (compute_step_time(each, CONSTANTS).parts["rollout.waiting"] for each in (inputs, slow))
    # the last prompt's cache: 256 tokens x 36 layers x 2 x 8 heads x 128 x 2 bytes, 8 siblings
    sent = 256 * 36 * 2 * 8 * 128 * 2 * 8 / (5e7 * CONSTANTS.nic_fraction)
    assert longer > sent > 100 * waiting


def test_all_nodes_of_the_trainer_write_a_checkpoint():
    one = compute_step_time(inputs_of(*COLOCATED), CONSTANTS).checkpoint_s
    assert one == pytest.approx(12 * NUM_PARAMETERS / CONSTANTS.disk_bytes_per_s)
    two = inputs_of(*APART, "cluster=h100_8x4", "parallel.data_parallel_size=16")
    assert compute_step_time(two, CONSTANTS).checkpoint_s == pytest.approx(one / 2)
