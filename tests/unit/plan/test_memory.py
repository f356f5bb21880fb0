"""Predicted memory: arithmetic by hand, what is held when, limits that are limits, and fixes that fix."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import yaml
from step_recipes import APART, COLOCATED, MAIN, inputs_of, with_gpu

from rlrecipes.plan.activations import compute_layer_activations
from rlrecipes.plan.calibration import CALIBRATION_FILE
from rlrecipes.plan.engine_memory import ServedEngines, compute_engine_memory, compute_memory_fraction
from rlrecipes.plan.memory import compute_memory, find_memory_problems, load_memory_constants
from rlrecipes.plan.memory_constants import MemoryConstants
from rlrecipes.plan.memory_nodes import PHASES, MemoryNode
from rlrecipes.plan.parameters import compute_num_parameters, compute_padded_vocab_size

CONSTANTS = load_memory_constants(None)
EXACT = dataclasses.replace(CONSTANTS, activation_overhead_fraction=0.0, expert_imbalance_fraction=0.0)
MOE = (
    "model=qwen3_30b_a3b",
    "topology=disaggregated",
    "cluster=h100_8x2",
    "weight_sync=distributed",
    "parallel.data_parallel_size=8",
    "parallel.expert_model_parallel_size=8",
    "data.max_prompt_tokens=1024",
    "rollout.sampling.max_new_tokens=7168",
    "parallel.max_tokens_per_micro_batch=8192",
)
LATENT = (
    "model=moonlight",
    "topology=disaggregated",
    "cluster=h200_8",
    "weight_sync=distributed",
    "parallel.data_parallel_size=2",
    "parallel.pipeline_model_parallel_size=3",
    "parallel.expert_model_parallel_size=2",
    "rollout.sampling.max_new_tokens=4096",
    "parallel.max_tokens_per_micro_batch=8192",
)
LAYOUT = (
    *APART,
    "parallel.data_parallel_size=1",
    "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.context_parallel_size=2",
)
SMALL = (*APART, "model=qwen3_0_6b")
CASES = {"colocated": COLOCATED, "apart": APART, "moe": MOE, "latent": LATENT, "layout": LAYOUT}


def memory_of(*overrides, constants=CONSTANTS):
    return compute_memory(inputs_of(*overrides), constants)


def trainer_of(memory):
    return next(role for role in memory.roles if role.stage is not None)


def with_parallel(inputs, **changes):
    return dataclasses.replace(inputs, parallel=inputs.parallel.model_copy(update=changes))


def test_every_constant_is_used_and_says_where_it_is_from():
    shipped = yaml.safe_load(CALIBRATION_FILE.read_text())["memory"]
    assert set(shipped) == {field.name for field in dataclasses.fields(MemoryConstants)}
    assert all(entry["source"].startswith(("assumed", "measured", "published", "SGLang")) for entry in shipped.values())


@pytest.mark.parametrize("case", CASES)
def test_a_prediction_is_a_valid_node(case):
    memory = memory_of(*CASES[case])
    assert MemoryNode.model_validate_json(memory.model_dump_json()) == memory
    assert all(tuple(role.parts) == PHASES for role in memory.roles)
    assert all(value > 0 for role in memory.roles for parts in role.parts.values() for value in parts.values())


def test_a_dense_layer_keeps_what_is_counted_by_hand():
    inputs = inputs_of(*COLOCATED)
    s = inputs.shapes
    found = compute_layer_activations(s, inputs.parallel, 0, 1.0)
    query, key = s.num_attention_heads * s.kv_channels, s.num_query_groups * s.kv_channels
    # two residuals, two norms; query, key, value, output, and query and key before their norms; gate, up and product
    assert found.kept == 4 * s.hidden_size + 2 * query + 2 * key + query + key + 3 * s.ffn_hidden_size
    assert found.entry == s.hidden_size
    split = with_parallel(inputs, tensor_model_parallel_size=4, sequence_parallel=True).parallel
    assert compute_layer_activations(s, split, 0, 1.0).kept == found.kept / 4
    whole = with_parallel(inputs, tensor_model_parallel_size=4).parallel
    assert compute_layer_activations(s, whole, 0, 1.0).kept == found.kept / 4 + 3 * s.hidden_size


def test_an_expert_layer_keeps_a_token_for_each_of_its_experts():
    inputs = inputs_of(*MOE)
    s = inputs.shapes
    kept = compute_layer_activations(s, inputs.parallel, 0, 1.0).kept
    uneven = compute_layer_activations(s, inputs.parallel, 0, 1.5).kept
    sent = s.moe_router_topk * (s.hidden_size + 3 * s.moe_ffn_hidden_size)
    assert uneven - kept == pytest.approx(sent / 2)
    dense = s.model_copy(update={"num_moe_experts": None})
    without = compute_layer_activations(dense, inputs.parallel, 0, 1.0).kept - 3 * s.ffn_hidden_size
    assert kept - without == pytest.approx(sent + 4 * s.num_moe_experts)


def test_one_rank_holds_eighteen_bytes_less_what_is_sharded():
    inputs = inputs_of(*COLOCATED)
    parts = trainer_of(compute_memory(inputs, EXACT)).parts["train"]
    shapes, tokens = inputs.shapes, inputs.parallel.max_tokens_per_micro_batch
    count = compute_num_parameters(shapes)
    count += (compute_padded_vocab_size(shapes.vocab_size, 1) - shapes.vocab_size) * shapes.hidden_size
    assert parts["trainer.weights"] == parts["trainer.gradients"] == 2 * count
    assert parts["trainer.optimizer"] == 12 * count / 8
    assert parts["trainer.logits"] == 2 * 2 * compute_padded_vocab_size(shapes.vocab_size, 1) * tokens
    layer = compute_layer_activations(shapes, inputs.parallel, 0, 1.0).kept
    # the last norm's input and the rows that the output layer takes are beside the layers
    assert parts["trainer.activations"] == 2 * tokens * (layer * shapes.num_layers + 2 * shapes.hidden_size)


def test_the_allocator_takes_more_of_all_that_comes_and_goes():
    inputs = inputs_of(*COLOCATED)
    more = dataclasses.replace(EXACT, activation_overhead_fraction=0.25)
    for phase in PHASES:
        exact, found = (trainer_of(compute_memory(inputs, constants)).parts[phase] for constants in (EXACT, more))
        coming = {"trainer.activations", "trainer.logits", "engine.activations"} & exact.keys()
        assert ("trainer.logits" in coming) == (phase in ("logprobs", "train"))
        assert found == exact | {name: round(1.25 * exact[name]) for name in coming}


def test_a_process_that_was_only_built_holds_less_but_weights_twice_until_it_has_an_optimizer():
    inputs = inputs_of(*COLOCATED)
    built = compute_memory(inputs, CONSTANTS).roles[0].parts["init"]
    assert built["trainer.workspace"] == round(CONSTANTS.trainer_start_bytes)
    assert built["engine.workspace"] == round(CONSTANTS.engine_start_bytes)
    assert built["trainer.loading"] == built["trainer.weights"] - built["trainer.optimizer"] > 0
    stages = {"pipeline_model_parallel_size": 2, "data_parallel_size": 64}
    whole, half = (
        compute_memory(with_parallel(inputs, **stages, virtual_pipeline_model_parallel_size=chunks), CONSTANTS).roles[0]
        for chunks in (None, 2)
    )
    moved = [role.parts["init"]["trainer.loading"] + role.parts["init"]["trainer.optimizer"] for role in (whole, half)]
    assert moved == [part := whole.parts["init"]["trainer.weights"], part / 2]  # a chunk after another
    alone = compute_memory(with_parallel(inputs, data_parallel_size=1), CONSTANTS).roles[0].parts["init"]
    assert alone["trainer.loading"] == 2 * inputs.shapes.vocab_size * inputs.shapes.hidden_size  # the largest tensor


def test_a_weight_sync_holds_a_bucket_where_one_is_copied():
    apart = inputs_of(*APART)
    bucket, tensor = apart.weight_sync.bucket_bytes, 2 * apart.shapes.vocab_size * apart.shapes.hidden_size

    def found(inputs):
        roles = compute_memory(inputs, CONSTANTS).roles
        parts = {name: value for role in roles for name, value in role.parts["weight_sync"].items()}
        return parts.get("trainer.weight_sync", 0), parts.get("engine.weight_sync", 0)

    largest = max(bucket, tensor)
    split = with_parallel(apart, tensor_model_parallel_size=4, data_parallel_size=1)
    assert found(apart) == (largest, 2 * largest)  # sent flat; SGLang lays the tensors out beside it
    assert found(split) == (2 * largest, 2 * largest)
    assert found(inputs_of(*COLOCATED)) == (largest, 0)  # engines read it where it lies
    tiny = apart.shapes.model_copy(update={"num_layers": 1, "vocab_size": 128})
    whole = 2 * compute_num_parameters(tiny)
    assert found(dataclasses.replace(apart, shapes=tiny)) == (whole, 2 * whole)  # all in one


def test_gradients_are_fp32_where_the_recipe_says_so():
    inputs = inputs_of(*COLOCATED, "+parallel.megatron.grad_reduce_in_fp32=true")
    parts = trainer_of(compute_memory(inputs, CONSTANTS)).parts["train"]
    assert parts["trainer.gradients"] == 2 * parts["trainer.weights"]


def test_an_update_has_a_copy_of_its_share_of_the_gradients():
    inputs = inputs_of(*COLOCATED)
    parts = trainer_of(compute_memory(inputs, CONSTANTS)).parts
    assert parts["update"]["trainer.gradient_copies"] == 4 * parts["train"]["trainer.gradients"] / 2 / 8
    assert not {"trainer.activations", "trainer.logits"} & parts["update"].keys()
    assert "trainer.gradient_copies" not in parts["train"] | parts["logprobs"]  # offloading dropped them
    apart = trainer_of(memory_of(*APART)).parts
    for phase in ("rollout", "logprobs", "update", "weight_sync"):  # until the next train step drops them
        assert apart[phase]["trainer.gradient_copies"] == 4 * apart["train"]["trainer.gradients"] / 2 / 8
    in_fp32 = inputs_of(*APART, "+parallel.megatron.grad_reduce_in_fp32=true")
    on_host = with_parallel(inputs_of(*APART), optimizer_cpu_offload=True)
    for other in (in_fp32, on_host, dataclasses.replace(inputs_of(*APART), dtype_bytes=4)):
        assert "trainer.gradient_copies" not in trainer_of(compute_memory(other, CONSTANTS)).parts["update"]


def test_an_optimizer_in_the_host_is_sent_one_tensor_at_a_time_in_fp32():
    inputs = with_parallel(inputs_of(*APART), optimizer_cpu_offload=True)
    embedding = 4 * inputs.shapes.vocab_size * inputs.shapes.hidden_size

    def found(inputs=inputs, **fields):
        parts = trainer_of(compute_memory(with_parallel(inputs, **fields), CONSTANTS)).parts
        return parts["init"]["trainer.loading"], parts["update"]["trainer.transfer"]

    weights = trainer_of(compute_memory(inputs, CONSTANTS)).parts["init"]["trainer.weights"]
    assert found() == (weights, embedding)  # the weights twice, while they move into their buffer
    assert found(tensor_model_parallel_size=2, data_parallel_size=1) == (
        pytest.approx(weights / 2, rel=1e-3),
        embedding / 2,
    )
    flat = dataclasses.replace(inputs, shapes=inputs.shapes.model_copy(update={"num_layers": 1}))
    assert found(flat, data_parallel_size=1) == (embedding, embedding)
    share = 4 * trainer_of(compute_memory(inputs, CONSTANTS)).parts["train"]["trainer.weights"] / 2 / 4096
    assert found(data_parallel_size=4096)[1] == pytest.approx(share, abs=1)  # no rank has more than its share
    for other in (inputs_of(*APART), dataclasses.replace(inputs, dtype_bytes=4)):
        assert "trainer.transfer" not in trainer_of(compute_memory(other, CONSTANTS)).parts["update"]


def test_moments_come_with_the_first_update():
    for dtype_bytes, copies in ((2, 4), (4, 0)):
        inputs = dataclasses.replace(inputs_of(*COLOCATED), dtype_bytes=dtype_bytes)
        parts = trainer_of(compute_memory(inputs, CONSTANTS)).parts
        count = parts["train"]["trainer.weights"] / dtype_bytes
        assert parts["init"].get("trainer.optimizer", 0) == copies * count / 8
        assert parts["train"]["trainer.optimizer"] == (copies + 8) * count / 8


def test_logprobs_hold_the_logits_of_two_micro_batches():
    inputs = inputs_of(*COLOCATED)
    parts = trainer_of(compute_memory(inputs, EXACT)).parts["logprobs"]
    tokens, vocab_size = inputs.parallel.max_tokens_per_micro_batch, inputs.shapes.vocab_size
    assert parts["trainer.logits"] == 2 * 2 * vocab_size * tokens
    # a layer needs less than the second's logits, which have three hidden states beside them
    assert parts["trainer.activations"] == 2 * tokens * 3 * inputs.shapes.hidden_size
    small = dataclasses.replace(inputs, shapes=inputs.shapes.model_copy(update={"vocab_size": 128}))
    layer = compute_layer_activations(small.shapes, small.parallel, 0, 1.0).whole
    parts = trainer_of(compute_memory(small, EXACT)).parts["logprobs"]
    assert parts["trainer.logits"] + parts["trainer.activations"] == 2 * tokens * (layer + 128)


@pytest.mark.parametrize("phase", ["logprobs", "train"])
def test_only_a_cut_distribution_is_computed_in_chunks(phase):
    inputs = inputs_of(*COLOCATED)
    whole, cut = (
        trainer_of(compute_memory(dataclasses.replace(inputs, is_distribution_cut=is_cut), CONSTANTS)).parts[phase]
        for is_cut in (False, True)
    )
    assert cut == whole | {"trainer.logprobs": CONSTANTS.logprob_chunk_bytes}


def activations_of(inputs):
    return trainer_of(compute_memory(inputs, EXACT)).parts["train"]["trainer.activations"]


@pytest.mark.parametrize("vocab_size", [128, 151936])
def test_recomputation_keeps_less_the_more_it_computes_again(vocab_size):
    whole = inputs_of(*COLOCATED)
    inputs = dataclasses.replace(whole, shapes=whole.shapes.model_copy(update={"vocab_size": vocab_size}))
    layer = compute_layer_activations(inputs.shapes, inputs.parallel, 0, 1.0)
    logits = 2 * vocab_size  # and their gradient, which are gone before a layer is computed again
    around = 2 * inputs.shapes.hidden_size  # the output layer
    scale, num_layers = 2 * inputs.parallel.max_tokens_per_micro_batch, inputs.shapes.num_layers
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    for size in (1, 4):
        kept = activations_of(with_parallel(inputs, **full, recompute_num_layers=size))
        above = max(around, size * layer.whole - logits)
        assert kept == scale * (num_layers / size * layer.entry + above)
    block = with_parallel(inputs, **full | {"recompute_method": "block"}, recompute_num_layers=6)
    again = max(around, layer.whole - logits)
    assert activations_of(block) == scale * (6 * layer.entry + (num_layers - 6) * layer.kept + again)
    mlp = with_parallel(inputs, recompute_granularity="selective", recompute_modules=("mlp",))
    for native, norm in (({}, inputs.shapes.hidden_size), ({"transformer_impl": "local"}, 0)):
        saved = scale * num_layers * (3 * inputs.shapes.ffn_hidden_size + norm)
        assert (
            activations_of(with_parallel(inputs, megatron=native)) - activations_of(with_parallel(mlp, megatron=native))
            == saved
        )


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    inputs = inputs_of(*COLOCATED)
    piped = with_parallel(inputs, pipeline_model_parallel_size=4, data_parallel_size=2)
    assert trainer_of(compute_memory(piped, EXACT)).stage == 0
    around = 2 * 2 * inputs.shapes.hidden_size * inputs.parallel.max_tokens_per_micro_batch  # the output layer
    in_layers = activations_of(inputs) - around
    assert activations_of(piped) == in_layers  # a quarter of the layers, four times
    chunks = with_parallel(inputs, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3)
    # of 12 chunks' layers 3 * 2 + 2 * 4 + 1 chunks of a twelfth each
    assert activations_of(chunks) == pytest.approx(in_layers * 15 / 12)


def test_what_is_given_back_is_gone_and_what_is_not_stays():
    role = memory_of(*COLOCATED).roles[0]
    assert role.name == "trainer+policy/0"
    process = {"context", "workspace", "nccl"}
    left = {f"trainer.{name}" for name in process}
    assert {name for name in role.parts["rollout"] if name.startswith("trainer")} == left
    assert set(role.parts["rollout"]) >= {"engine.weights", "engine.kv_cache"}
    released = {name for name in role.parts["train"] if name.startswith("engine")}
    assert released == {f"engine.{name}" for name in (process - {"nccl"}) | {"cuda_graphs"}}
    assert "engine.kv_cache" not in role.parts["weight_sync"]  # weights come before the cache
    assert "engine.weights" in role.parts["weight_sync"]
    sending = {name for name in role.parts["weight_sync"] if name.startswith("trainer")}
    assert sending == left | {"trainer.weights", "trainer.weight_sync"}  # two copies of the weights
    held = {
        name: size for name, size in role.parts["train"].items() if name in ("trainer.weights", "trainer.optimizer")
    }
    assert role.host_bytes == sum(held.values())  # gradients are not kept
    kept = memory_of(*COLOCATED, "topology.should_offload_trainer=false", "topology.should_offload_engines=false")
    for phase in PHASES:
        assert {"trainer.weights", "engine.kv_cache"} <= set(kept.roles[0].parts[phase])
    assert not kept.is_fitting
    apart = memory_of(*APART)
    assert {role.name for role in apart.roles} == {"trainer", "policy/0"}


def test_frozen_weights_wait_in_the_host_and_visit():
    plain, kept = (trainer_of(memory_of(*COLOCATED, f"algo.kl.placement={kind}")) for kind in ("none", "loss"))
    weights = plain.parts["train"]["trainer.weights"]
    assert kept.host_bytes - plain.host_bytes == weights
    assert kept.sum_phase("logprobs") - plain.sum_phase("logprobs") == weights
    assert kept.sum_phase("train") == plain.sum_phase("train")


def test_a_critic_costs_what_a_policy_without_output_layer_does():
    plain, both = (trainer_of(memory_of(*COLOCATED, *more)) for more in ((), ("algo=ppo", "model=qwen3_8b")))
    assert "trainer.critic" not in plain.parts["train"]
    shapes = inputs_of(*COLOCATED, "model=qwen3_8b").shapes
    lookup = compute_padded_vocab_size(shapes.vocab_size, 1) * shapes.hidden_size
    count = both.parts["train"]["trainer.weights"] / 2 - lookup + shapes.hidden_size
    assert both.parts["train"]["trainer.critic"] == pytest.approx(count * (2 + 2 + 12 / 8))


def test_offloaded_state_moves_to_the_host():
    inputs = inputs_of(*APART)
    here = trainer_of(compute_memory(inputs, CONSTANTS))
    there = trainer_of(compute_memory(with_parallel(inputs, optimizer_cpu_offload=True), CONSTANTS))
    state = here.parts["train"]["trainer.optimizer"]
    assert "trainer.optimizer" not in there.parts["train"]
    assert there.host_bytes - here.host_bytes == state


@pytest.mark.parametrize("case", ["colocated", "apart", "latent", "layout"])
def test_the_largest_micro_batch_fits_and_one_percent_more_does_not(case):
    inputs = inputs_of(*CASES[case])
    largest = compute_memory(inputs, CONSTANTS).max_tokens_per_micro_batch
    assert largest > 0

    def trainer_fits(tokens):
        memory = compute_memory(with_parallel(inputs, max_tokens_per_micro_batch=tokens), CONSTANTS)
        return all(role.peak_bytes <= memory.usable_bytes for role in memory.roles if role.stage is not None)

    assert trainer_fits(largest)
    assert not trainer_fits(math.ceil(largest * 1.01))


def test_the_cache_holds_as_many_longest_rollouts_as_it_says():
    inputs = inputs_of(*APART)
    memory = compute_memory(inputs, CONSTANTS)
    room, group = memory.engines[0], inputs.engine_groups[0]
    longest = inputs.max_prompt_tokens + inputs.max_new_tokens
    assert room.max_longest_rollouts == room.capacity_tokens // longest
    fraction = compute_memory_fraction(inputs.gpu.memory_bytes, group)
    weights = memory.roles[0].parts["rollout"]["engine.weights"]
    assert room.capacity_tokens == pytest.approx(
        (fraction * (inputs.gpu.memory_bytes - CONSTANTS.cuda_context_bytes) - weights) / room.kv_bytes_per_token, abs=2
    )
    limited = memory_of(*APART, f"+{MAIN}.sglang.max_total_tokens=20000")
    assert limited.engines[0].capacity_tokens == 20000
    halved = memory_of(*APART, f"+{MAIN}.sglang.kv_cache_dtype=fp8_e4m3")
    assert halved.engines[0].kv_bytes_per_token * 2 == room.kv_bytes_per_token


def test_gated_delta_nets_hold_a_state_for_each_rollout():
    overrides = ("model=qwen3_next_80b_a3b", "topology=disaggregated", "cluster=h200_8", "weight_sync=distributed")
    memory = memory_of(*overrides, f"{MAIN}.gpus_per_engine=4", "parallel.max_tokens_per_micro_batch=64")
    room = memory.engines[0]
    assert room.max_longest_rollouts < room.capacity_tokens / 40  # a rollout of 32 tokens, and its state


@pytest.mark.parametrize(("memory_mib", "expected"), [(24564, 0.847), (81559, 0.835), (143771, 0.907)])
def test_an_engine_takes_what_sglang_would(memory_mib, expected):
    """Its formula by hand: 512 MiB, 1.5 a token of a chunk, 2 a request of a graph, an eighth of a GiB a GPU."""
    group = inputs_of(*APART).engine_groups[0]
    assert compute_memory_fraction(memory_mib << 20, group) == expected


@pytest.mark.parametrize(
    ("options", "num_requests"),
    [
        ((), 256),
        (("cuda_graph_max_bs_decode=64",), 64),
        (("cuda_graph_max_bs=64",), 64),  # its former name
        (("cuda_graph_bs_decode=[1,16,48]", "cuda_graph_max_bs_decode=64"), 48),
        (("disable_cuda_graph=true",), 0),
        (("disable_decode_cuda_graph=true",), 0),
        (("cuda_graph_backend_decode=disabled",), 0),
        (("cuda_graph_backend_prefill=disabled",), 256),
    ],
)
def test_decode_graphs_are_as_many_as_sglang_captures(options, num_requests):
    memory = memory_of(*COLOCATED, *(f"+{MAIN}.sglang.{option}" for option in options))
    parts = memory.roles[0].parts["rollout"]
    assert parts.get("engine.cuda_graphs", 0) == round(num_requests * CONSTANTS.engine_graph_request_bytes)


def test_engines_that_put_their_own_weights_back_keep_them_in_the_host():
    inputs = inputs_of(*COLOCATED)
    frozen = ServedEngines("judge/main", inputs.shapes, 2, False, inputs.engine_groups[0])
    memory = compute_engine_memory(inputs, frozen, CONSTANTS)
    assert memory.host_bytes == memory.parts["rollout"]["weights"]
    role = compute_memory(inputs, CONSTANTS, (frozen,)).roles[0]
    assert role.host_bytes == compute_memory(inputs, CONSTANTS).roles[0].host_bytes + memory.host_bytes
    staying = dataclasses.replace(inputs, should_offload_engines=False)
    for other, served in ((staying, frozen), (inputs, dataclasses.replace(frozen, is_updated=True))):
        assert compute_engine_memory(other, served, CONSTANTS).host_bytes == 0


def apply(inputs, fix):
    """The inputs that a fix leads to."""
    types = {"true": True, "false": False}
    for path, value in re.findall(r"(parallel|topology)\.(\w+=\S+)", fix):
        name, _, text = value.partition("=")
        parsed = types.get(text, int(text) if text.isdigit() else text.strip('"'))
        inputs = (
            with_parallel(inputs, **{name: parsed})
            if path == "parallel"
            else dataclasses.replace(inputs, **{name: parsed})
        )
    return inputs


@pytest.mark.parametrize("memory_gb", [20, 26, 32, 40, 60, 80, 100, 141])
@pytest.mark.parametrize("case", ["colocated", "apart", "layout"])
def test_what_is_advised_is_enough(case, memory_gb):
    inputs = with_gpu(inputs_of(*CASES[case]), memory_bytes=memory_gb * 10**9)
    memory = compute_memory(inputs, CONSTANTS)
    problems = find_memory_problems(inputs, CONSTANTS, memory)
    assert bool(problems) == (not memory.is_fitting)
    for problem in problems:
        if problem.where.startswith("parallel.") and problem.fix.startswith("set"):
            role = trainer_of(compute_memory(apply(inputs, problem.fix), CONSTANTS))
            assert role.sum_phase("train") <= memory.usable_bytes, problem


def test_engines_whose_caches_nixl_knows_are_not_told_to_give_them_back():
    words = ("model=qwen3_4b", "cluster=h200_8", "parallel=dp2", "topology=pd_colocated", "algo=ppo")
    inputs = inputs_of(*words, "topology.should_offload_trainer=false", "parallel.max_tokens_per_micro_batch=65536")
    problems = find_memory_problems(inputs, CONSTANTS, compute_memory(inputs, CONSTANTS))
    assert problems
    for problem in problems:
        assert "topology.should_offload_trainer=true" in problem.fix
        assert "should_offload_engines" not in problem.fix


def test_an_engine_that_takes_too_much_is_told_how_much_it_may_take():
    greedy = inputs_of(*SMALL, f"+{MAIN}.sglang.mem_fraction_static=0.99")
    (problem,) = find_memory_problems(greedy, CONSTANTS, compute_memory(greedy, CONSTANTS))
    assert problem.where.endswith("sglang.mem_fraction_static")
    allowed = re.search(r"0\.\d+", problem.fix)[0]
    modest = inputs_of(*SMALL, f"+{MAIN}.sglang.mem_fraction_static={allowed}")
    assert find_memory_problems(modest, CONSTANTS, compute_memory(modest, CONSTANTS)) == []


def test_a_cache_without_room_for_one_rollout_is_a_problem():
    inputs = inputs_of(*SMALL, f"+{MAIN}.sglang.max_total_tokens=9000")
    (problem,) = find_memory_problems(inputs, CONSTANTS, compute_memory(inputs, CONSTANTS))
    assert problem.where.endswith(".gpus_per_engine")
    assert "one longest rollout has 9216" in problem.problem


def test_a_rollout_of_evaluation_needs_room_in_the_cache_and_none_in_the_trainer():
    words = (*SMALL, f"+{MAIN}.sglang.max_total_tokens=10000", "rollout.evaluation.sampling.max_new_tokens=10000")
    inputs = inputs_of(*words)
    (problem,) = find_memory_problems(inputs, CONSTANTS, compute_memory(inputs, CONSTANTS))
    assert "holds 10000 tokens; one longest rollout has 11024" in problem.problem
    assert "evaluation" in problem.fix
    assert inputs.max_prompt_tokens + inputs.max_new_tokens == 9216


def test_a_stage_without_layers_and_a_model_without_cache_divide_nothing_by_zero():
    inputs = inputs_of(*APART)
    shapes = inputs.shapes.model_copy(update={"num_layers": 3})
    native = {"account_for_embedding_in_pipeline_split": True}
    empty = with_parallel(inputs, pipeline_model_parallel_size=4, data_parallel_size=2, megatron=native)
    assert compute_memory(dataclasses.replace(empty, shapes=shapes), CONSTANTS).max_tokens_per_micro_batch > 0
    linear = inputs_of("model=qwen3_5_0_8b", *APART[1:]).shapes.model_copy(update={"linear_attention_freq": 99})
    assert compute_memory(dataclasses.replace(inputs, shapes=linear), CONSTANTS).engines[0].max_longest_rollouts > 1
