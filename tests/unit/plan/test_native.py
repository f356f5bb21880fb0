"""Options under engines' own names: what is misspelt, mistyped or decided elsewhere is refused by the Plan."""

from __future__ import annotations

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan import native
from rlrecipes.plan.inventory import load_inventory
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
POLICY = "topology.served_models.policy"
GROUP = f"{POLICY}.server_groups.main"
SERVER = f"{GROUP}.sglang"
REAL = ("topology=sglang_cpu", f"{GROUP}.python=null")


def plan_of(*overrides, **kwargs):
    recipe = compose(overrides, **kwargs)
    return resolve(recipe.config, HOSTS, recipe.origins)


def problems_of(*overrides, **kwargs):
    with pytest.raises(ConfigError) as caught:
        plan_of(*overrides, **kwargs)
    return {problem.where: problem for problem in caught.value.problems}


def check(section, table, *overrides):
    """Hold one recipe that has every wrong option of a table against the fixes it should get."""
    found = problems_of(*overrides, *(f"{section}.{word}" for word in table))
    assert set(found) == {f"{section}.{word.partition('=')[0]}" for word in table}
    for word, fix in table.items():
        problem = found[f"{section}.{word.partition('=')[0]}"]
        assert fix in problem.fix, word
        assert problem.origin == f"override {section}.{word}"


@pytest.mark.parametrize("topology", [(), REAL], ids=["embedded", "sglang"])
def test_options_that_any_server_refuses(topology):
    table = {
        "max_runing_requests=3": "did you mean 'max_running_requests'?",
        "max-total-tokens=3": "did you mean 'max_total_tokens'?",
        "max_running_requests='3'": "an integer",
        "port=70000": "below 65536",
        "model_path=x": "set model.path",
        "model=x": "set model.path",
        "tp_size=2": f"set {GROUP}.gpus_per_engine",
        "tensor-parallel-size=2": f"set {GROUP}.gpus_per_engine",
        "random_seed=2": "set seed",
        "dtype=float32": "set model.dtype",
        "device=cpu": "set topology.device",
        "host=0.0.0.0": "remove it",
        "pp_size=2": f"set {GROUP}.pipeline_parallel_size",
        "dp_size=2": f"set {GROUP}.attention_data_parallel_size",
        "enable_dp_attention=true": f"set {GROUP}.attention_data_parallel_size",
        "ep_size=2": f"set {GROUP}.expert_parallel_size",
        "nnodes=2": "the Plan lays engines over nodes",
        "node_rank=0": "the Plan lays engines over nodes",
        "dist_init_addr=a:1": "the Plan lays engines over nodes",
        "base_gpu_id=1": "the Plan gives every engine its GPUs",
        "gpu_id_step=2": "the Plan gives every engine its GPUs",
        "disaggregation_mode=decode": f"set {GROUP}.worker_type",
        "disaggregation_bootstrap_port=3000": "the run finds a free port",
        "encoder_only=true": f"set {GROUP}.worker_type",
        "language_only=true": "worker_type=encoder",
        "encoder_urls=[a]": "worker_type=encoder",
        "enable_memory_saver=true": "set topology.should_offload_engines",
        "enable-weights-cpu-backup=true": "set topology.should_offload_engines",
    }
    check(SERVER, table, *topology)


def test_options_that_the_embedded_engine_refuses():
    table = {
        "max_running_requests=0": "at least 1",
        "log_level=warn": "did you mean 'warning'?",
        "mem_fraction_static=0.5": "engine=sglang, which has it",
        "port=0": "below 65536",
        "tp=2": "gpus_per_engine",
    }
    check(SERVER, table)


def test_options_that_the_real_sglang_refuses():
    table = {
        "mem_fraction_static=big": "write a number",
        "attention_backend=trito": "did you mean 'triton'?",
        "trust_remote_code=1": "write true or false",
        "preferred_sampling_params={a:1}": "JSON in a string",
        "dllm_fdfo=false": "write no_dllm_fdfo: true",
        "config=server.yaml": "write the options of that file here",
        "lora_target_modules=[q_proj,q_prj]": "did you mean 'q_proj'?",
        "pipeline_parallel_size=2": f"set {GROUP}.pipeline_parallel_size",
        "data-parallel-size=2": f"set {GROUP}.attention_data_parallel_size",
        "ep=2": f"set {GROUP}.expert_parallel_size",
        "nccl_init_addr=a:1": "the Plan lays engines over nodes",
    }
    check(SERVER, table, *REAL)


def test_what_sglang_takes_reaches_its_command_line():
    words = ["context_length=0.1k", "trust_remote_code=true", "no_dllm_fdfo=true", "lora_target_modules=[q_proj]"]
    command = plan_of(*REAL, *(f"{SERVER}.{word}" for word in words)).policy.engines[0].command
    assert {"--trust-remote-code", "--no-dllm-fdfo"} <= set(command)
    assert command[command.index("--context-length") + 1] == "0.1k"


def test_options_that_the_router_refuses():
    table = {
        "polcy=manual": "did you mean 'policy'?",
        "policy=manuel": "did you mean 'manual'?",
        "max_payload_size=1.5": "an integer",
        "port=99999": "below 65536",
        "request_timeout_secs=3": "set rollout.request_timeout_s",
        "worker_urls=[a]": "server_groups",
        "pd_disaggregation=true": "set worker_type",
        "prefill=[a]": "set worker_type",
        "decode=[a]": "set worker_type",
    }
    check(f"{POLICY}.router", table)


def test_options_that_megatron_refuses():
    table = {
        "hidden_dropot=0.1": "did you mean 'hidden_dropout'?",
        "fp8_recipe=delaid": "did you mean 'delayed'?",
        "num_layers_at_start_in_bf16=2.5": "an integer",
        "hidden_dropout=null": "write a number",
        "init_method=normal": "only code can give it a value",
        "num_layers=3": "set model.shapes.num_layers",
        "layernorm_epsilon=1e-5": "set model.shapes.norm_epsilon",
        "sequence_parallel=true": "set parallel.sequence_parallel",
        "context_parallel_size=2": "set parallel.context_parallel_size",
        "recompute_granularity=full": "set parallel.recompute_granularity",
        "optimizer_cpu_offload=true": "set parallel.optimizer_cpu_offload",
        "batch_p2p_comm=true": "the trainer is built on it",
        "lr=1e-3": "set optim.lr",
        "overlap_grad_reduc=true": "did you mean 'overlap_grad_reduce'?",
        "overlap_grad_reduce=1": "true or false",
        "overlap_param_gather=true": "right after a train step",
        "bucket_size=1.5": "an integer",
        "optimizer=sgd": "the trainer is built on it",
        "exp_avg_dtype=float32": "only code can give it a value",
    }
    check("parallel.megatron", table)


def test_what_reasoning_gym_refuses():
    table = {
        "chain_sm={}": "did you mean 'chain_sum'?",
        "spell_backward.min_word_le=3": "'min_word_len'",
        "spell_backward.min_word_len='3'": "an integer",
        "spell_backward.seed=3": "set data.tasks.seed",
    }
    check("data.tasks.datasets", table)


def test_all_sections_are_told_together_with_file_and_line(tmp_path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "mine.yaml").write_text("defaults:\n  - single\n  - _self_\nmegatron:\n  fp32: true\n")
    found = problems_of(
        "parallel=mine", f"{SERVER}.x=1", f"{POLICY}.router.x=1", "algo.group_size=1", config_dir=tmp_path
    )
    assert set(found) == {"parallel.megatron.fp32", f"{SERVER}.x", f"{POLICY}.router.x", "algo.group_size"}
    assert found["parallel.megatron.fp32"].origin.endswith("parallel/mine.yaml:5")


def test_deterministic_inference_is_the_recipes_where_it_asks_for_determinism():
    where = f"{SERVER}.enable_deterministic_inference"
    assert plan_of(f"{where}=true").policy.engines[0].command[-1] == "--enable-deterministic-inference"
    assert "deterministic=true" in problems_of("deterministic=true", f"{where}=false")[where].fix


def test_another_installed_version_judges_itself_and_is_told(monkeypatch):
    monkeypatch.setattr(native, "read_installed_version", lambda package, python: "9.9.9")
    plan = plan_of(*REAL, f"{SERVER}.brand_new=1", f"{SERVER}.attention_backend=brand_new")
    versions = [note for note in plan.notes if "9.9.9" in note]
    assert any(f"sglang 9.9.9 is installed, but its options are known as of {load_inventory('sglang').version}" in note
               for note in versions)  # fmt: skip
    assert any(f"{SERVER}.brand_new is no option of SGLang; passed on unjudged" in note for note in plan.notes)
    assert any(f"{SERVER}.attention_backend" in note for note in plan.notes)
    assert {"--brand-new", "--attention-backend"} <= set(plan.policy.engines[0].command)
    assert f"{SERVER}.tp_size" in problems_of(*REAL, f"{SERVER}.tp_size=2")


def test_nothing_is_noted_where_the_pinned_versions_are_installed():
    assert not [note for note in plan_of("parallel.megatron.hidden_dropout=0.1").notes if "installed" in note]
