"""Options under other packages' own names, held against their inventories. Owns which of them the recipe decides.

Judged are `sglang:`, `router:` and `megatron:` sections and the parameters of reasoning-gym's datasets. Where another
version is installed than an inventory was read from, what the inventory does not know is told as a note and left to
that version; options that the recipe decides are refused all the same.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlrecipes.config.schema import RunConfig, ServerGroupConfig
from rlrecipes.errors import Problem
from rlrecipes.plan.inventory import Inventory, InventoryName, Option, load_inventory, read_installed_version
from rlrecipes.suggest import did_you_mean

type Owned = Mapping[str, str]
"""Option -> what to do instead of setting it."""

_FAMILY = "remove it: model.family decides it"
_FIXED = "remove it: the trainer is built on it"

SERVER_OWNED: Owned = {
    "model_path": "set model.path, or path of the served model",
    "dtype": "set model.dtype",
    "device": "set topology.device",
    "random_seed": "set seed",
    "host": "remove it: engines listen where their router asks",
    "skip_tokenizer_init": "remove it: an engine keeps its tokenizer",
    "config": "remove it, and write the options of that file here",
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), "remove it: the Plan lays engines over nodes"),
    **dict.fromkeys(("base_gpu_id", "gpu_id_step"), "remove it: the Plan gives every engine its GPUs"),
    "disaggregation_bootstrap_port": "remove it: the run finds a free port",
    **dict.fromkeys(("language_only", "encoder_urls"), "give the served model a group of worker_type=encoder"),
    **dict.fromkeys(("enable_memory_saver", "enable_weights_cpu_backup"), "set topology.should_offload_engines"),
}
"""Options of a server; those below and ``enable_deterministic_inference`` join them with the group's path."""

_GROUP_OWNED: Owned = {
    "tp_size": "gpus_per_engine",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "attention_data_parallel_size",
    "enable_dp_attention": "attention_data_parallel_size",
    "ep_size": "expert_parallel_size",
    "disaggregation_mode": "worker_type",
    "encoder_only": "worker_type",
}
"""Options of a server -> the key of its group that decides them."""

ROUTER_OWNED: Owned = {
    "worker_urls": "set server_groups of the served model",
    "request_timeout_secs": "set rollout.request_timeout_s",
    "host": "remove it: the router listens where the run asks",
    **dict.fromkeys(("pd_disaggregation", "prefill", "decode"), "set worker_type of the served model's server_groups"),
}

MEGATRON_OWNED: Owned = {
    **{
        name: f"set model.shapes.{name}"
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "qk_layernorm",
            "add_qkv_bias",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_router_pre_softmax",
        )
    },
    "layernorm_epsilon": "set model.shapes.norm_epsilon",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "set model.dtype"),
    **dict.fromkeys(("normalization", "gated_linear_unit", "activation_func", "add_bias_linear"), _FAMILY),
    **{
        name: f"set parallel.{name}"
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "optimizer_cpu_offload",
        )
    },
    **dict.fromkeys(
        (
            "variable_seq_lengths",
            "moe_token_dispatcher_type",
            "moe_router_load_balancing_type",
            "moe_grouped_gemm",
            "calculate_per_token_loss",
            "overlap_p2p_comm",
            "batch_p2p_comm",
            "microbatch_group_size_per_vp_stage",
            "optimizer",
            "use_distributed_optimizer",
            "use_layer_wise_distributed_optimizer",
            "use_precision_aware_optimizer",
            "num_distributed_optimizer_instances",
            "average_in_collective",
            "use_megatron_fsdp",
            "use_custom_fsdp",
        ),
        _FIXED,
    ),
    **dict.fromkeys(
        ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
        "remove it: weights are read right after a train step",
    ),
    **{
        name: f"set optim.{name}"
        for name in ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    },
}
_TASK_OWNED: Owned = {
    "seed": "set data.tasks.seed",
    "size": "set data.tasks.num_train_rows and num_eval_rows",
}


@dataclass(slots=True)
class NativeJudgement:
    """What was found in the native sections of a recipe.

    Attributes:
        problems: that refuse it.
        notes: that a reader should know.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Section:
    where: str
    native: Mapping[str, Any]
    inventory: InventoryName
    groups: tuple[str, ...]
    owned: Owned
    program: str
    python: str | None = None
    is_command_line: bool = True

    def read_options(self, inventory: Inventory) -> Mapping[str, Option]:
        """Options of all groups of the section; what several have is judged by the first."""
        return ChainMap(*(dict(inventory.groups[group]) for group in self.groups))


def judge_native(config: RunConfig) -> NativeJudgement:
    """Hold every native section of a recipe against its inventory.

    Args:
        config: the recipe.
    """
    judgement = NativeJudgement()
    noted: set[str] = set()
    for section in _sections(config):
        if not section.native:
            continue
        inventory = load_inventory(section.inventory)
        judgement.problems += _owned(section, inventory)
        unknown = [*_judge(section, inventory)]
        note = _version_note(section, inventory)
        if note is None:
            judgement.problems += unknown
            continue
        if note not in noted:
            judgement.notes.append(note)
            noted.add(note)
        judgement.notes += [f"{problem.where} {problem.problem}; passed on unjudged" for problem in unknown]
    if config.data.tasks is not None:
        known = load_inventory("reasoning_gym")
        for name in config.data.tasks.datasets:
            if name not in known.groups and _version_note(_task(name, {}), known) is None:
                where, problem = f"data.tasks.datasets.{name}", f"reasoning-gym has no dataset {name!r}"
                judgement.problems.append(Problem(where, problem, did_you_mean(name, known.groups)))
    return judgement


def _sections(config: RunConfig) -> Iterator[_Section]:
    for name, model in config.topology.served_models.items():
        where = f"topology.served_models.{name}"
        yield _Section(f"{where}.router", model.router, "router", ("RouterArgs",), ROUTER_OWNED, "sglang-router")
        for group_name, group in model.server_groups.items():
            yield _server(f"{where}.server_groups.{group_name}", group, config)
    yield _Section(
        "parallel.megatron",
        config.parallel.megatron,
        "megatron",
        ("TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig"),
        MEGATRON_OWNED,
        "Megatron",
        is_command_line=False,
    )
    if config.data.tasks is not None:
        known = load_inventory("reasoning_gym").groups
        yield from (_task(name, params) for name, params in config.data.tasks.datasets.items() if name in known)


def _server(where: str, group: ServerGroupConfig, config: RunConfig) -> _Section:
    owned = {**SERVER_OWNED, **{name: f"set {where}.{key}" for name, key in _GROUP_OWNED.items()}}
    if config.deterministic:
        owned["enable_deterministic_inference"] = "remove it: deterministic=true sets it"
    if group.engine == "embedded":
        known = ("ServerArguments",)
        return _Section(f"{where}.sglang", group.sglang, "embedded", known, owned, "the embedded engine", group.python)
    return _Section(f"{where}.sglang", group.sglang, "sglang", ("ServerArgs",), owned, "SGLang", group.python)


def _task(name: str, params: Mapping[str, Any]) -> _Section:
    where = f"data.tasks.datasets.{name}"
    return _Section(where, params, "reasoning_gym", (name,), _TASK_OWNED, name, is_command_line=False)


def _owned(section: _Section, inventory: Inventory) -> Iterator[Problem]:
    for name in section.native:
        fix = section.owned.get(_first_name(name, inventory))
        if fix is not None:
            yield Problem(f"{section.where}.{name}", "is decided elsewhere in the recipe or by the Plan", fix)


def _first_name(name: str, inventory: Inventory) -> str:
    plain = name.replace("-", "_")
    return inventory.aliases.get(plain, plain)


def _judge(section: _Section, inventory: Inventory) -> Iterator[Problem]:
    options = section.read_options(inventory)
    for name, value in section.native.items():
        where = f"{section.where}.{name}"
        if _first_name(name, inventory) in section.owned:
            continue
        if name not in options:
            yield Problem(where, f"is no option of {section.program}", _where_else(name, section, inventory))
            continue
        found = options[name].find_problem(value) or (
            _unsayable(name, value, options) if section.is_command_line else None
        )
        if found is not None:
            yield Problem(where, *found)


def _unsayable(name: str, value: Any, options: Mapping[str, Option]) -> tuple[str, str] | None:
    """A flag that is on unless its own negation is given: leaving the flag out would not say false."""
    negation = f"no_{name}"
    default = options[name].default
    if value is not False or default is False or (default is None and negation not in options):
        return None
    fix = f"write {negation}: true" if negation in options else "remove it"
    return "is false, which no flag of that name can say", fix


def _where_else(name: str, section: _Section, inventory: Inventory) -> str:
    options = section.read_options(inventory)
    allowed = [option for option in options if _first_name(option, inventory) not in section.owned]
    if section.inventory == "embedded" and name in load_inventory("sglang").groups["ServerArgs"]:
        return f"remove it, or use engine=sglang, which has it; allowed: {', '.join(allowed)}"
    return did_you_mean(name, allowed)


def _version_note(section: _Section, inventory: Inventory) -> str | None:
    if inventory.package is None:
        return None
    installed = read_installed_version(inventory.package, section.python)
    if installed in (None, inventory.version):
        return None
    return (
        f"{inventory.package} {installed} is installed, but its options are known as of {inventory.version}: "
        "what is unknown or of another type there is passed on unjudged"
    )
