"""Exact command lines of servers and routers. Owns how native options become flags; starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlrecipes.config.schema import NativeOptions, RunConfig, ServedModelConfig, ServerGroupConfig

_HOST = "127.0.0.1"


def to_flags(native: NativeOptions) -> Iterator[str]:
    """Native options as command-line words: ``{"a_b": 1}`` -> ``--a-b 1``; true is the bare flag, false and null none.

    Args:
        native: options under the program's own names.
    """
    for name, value in native.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            yield flag
        elif isinstance(value, list):
            yield from (flag, *(str(item) for item in value))
        elif value is not None and value is not False:
            yield from (flag, str(value))


def to_engine_command(
    group: ServerGroupConfig,
    config: RunConfig,
    number: int,
    index: int,
    *,
    has_encoders: bool,
    node_rank: int,
    num_nodes: int,
) -> tuple[str, ...]:
    """The command line of one engine's process, with placeholders for what only its host knows.

    Args:
        group: the server group.
        config: the recipe.
        number: of the engine in its group; a port the recipe names is the first engine's, the next takes the next.
        index: of the engine among all, which sets its seed.
        has_encoders: whether encoders of the same model take the images.
        node_rank: of the process in its engine.
        num_nodes: that the engine spans.
    """
    module = "rlrecipes.engines.embedded.server" if group.engine == "embedded" else "sglang.launch_server"
    options = dict(group.sglang)
    first_port = options.pop("port", None)
    port = "{port}" if first_port is None else str(first_port + number)
    words = ["{python}", "-m", module, "--model-path", "{model_path}", "--host", "{host}", "--port", port]
    words += ["--dtype", config.model.dtype, "--random-seed", str(config.seed + index)]
    native = _layout_options(group) | _role_options(group, has_encoders=has_encoders)
    if config.deterministic:
        native["enable_deterministic_inference"] = True
    if group.engine == "sglang" and config.topology.device == "cpu":
        native |= _SGLANG_CPU
    if _gives_memory_back(group, config) and config.topology.device == "cuda":
        native["enable_memory_saver"] = True
        if not _is_updated(group, config):  # no weight sync brings back what it released
            native["enable_weights_cpu_backup"] = True
    if num_nodes > 1:
        native |= {"nnodes": num_nodes, "node_rank": node_rank, "dist_init_addr": "{dist_init_addr}"}
    elif group.engine == "sglang":
        # Its own choice is one of the kernel's ports, bound a minute later, when another process may have it.
        native["nccl_port"] = "{nccl_port}"
    return (*words, *to_flags(native | options))


def _gives_memory_back(group: ServerGroupConfig, config: RunConfig) -> bool:
    """Whether engines of the group take turns with the trainer; one that encodes has no such endpoint."""
    is_server = group.engine == "sglang" and group.worker_type != "encoder"
    return is_server and group.placement == "colocated" and config.topology.should_offload_engines


def _is_updated(group: ServerGroupConfig, config: RunConfig) -> bool:
    models = config.topology.served_models.values()
    return any(model.is_updated for model in models if any(own is group for own in model.server_groups.values()))


def _layout_options(group: ServerGroupConfig) -> NativeOptions:
    """What differs from one process on one GPU."""
    native: NativeOptions = {}
    tp = group.gpus_per_engine // group.pipeline_parallel_size
    sizes = {"tp_size": tp, "pp_size": group.pipeline_parallel_size, "ep_size": group.expert_parallel_size}
    native |= {name: size for name, size in sizes.items() if size > 1}
    if group.attention_data_parallel_size > 1:
        native |= {"dp_size": group.attention_data_parallel_size, "enable_dp_attention": True}
    return native


def _role_options(group: ServerGroupConfig, *, has_encoders: bool) -> NativeOptions:
    if group.worker_type == "encoder":
        return {"encoder_only": True}
    native: NativeOptions = {}
    if group.worker_type in ("prefill", "decode"):
        native["disaggregation_mode"] = group.worker_type
    if group.worker_type == "prefill":
        native["disaggregation_bootstrap_port"] = "{bootstrap_port}"
    if has_encoders and group.worker_type in ("regular", "prefill"):
        native |= {"language_only": True, "encoder_urls": ["{encoder_urls}"]}
    return native


def to_engine_env(group: ServerGroupConfig, config: RunConfig, gpus: Sequence[int]) -> dict[str, str]:
    """Environment of one process of an engine; the recipe's own entries win.

    Args:
        group: the server group.
        config: the recipe.
        gpus: of its node that it may use.
    """
    env = {"HF_HUB_OFFLINE": "1"}
    if group.engine == "sglang":
        # The router keeps an idle connection for 50 s. SGLang closes it after 5, and a request under way then is lost.
        env |= {"SGLANG_TIMEOUT_KEEP_ALIVE": "120"}
    if config.topology.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if group.engine == "sglang":
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": "{standins}"}
    else:
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    if _gives_memory_back(group, config):
        # Otherwise the router's health checks make a token each, out of memory that is not there.
        env |= {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    return env | group.env


_SGLANG_CPU: NativeOptions = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # its scheduler otherwise spins on a core that the trainer needs
}


def to_router_command(model: ServedModelConfig, request_timeout_s: float) -> tuple[str, ...]:
    """The command line of the router in front of one model.

    Retries and the circuit breaker are off: a failed generation is the collector's to see, and a worker that
    answers slowly while weights are synced is not a broken one.

    Args:
        model: the recipe's served model.
        request_timeout_s: longest time of one request.
    """
    own: NativeOptions = {
        "request_timeout_secs": int(request_timeout_s),
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "worker_startup_check_interval": 1,
        "prometheus_host": _HOST,
        "prometheus_port": "{metrics_port}",  # its default is one port for all routers of a host
        "log_level": "warn",
    }
    port = str(model.router.get("port", "{port}"))
    options = own | {name: value for name, value in model.router.items() if name != "port"}
    words = ["{python}", "-m", "sglang_router.launch_router", "--host", _HOST, "--port", port]
    if any(group.worker_type == "prefill" for group in model.server_groups.values()):
        workers = ["--pd-disaggregation", "{prefill_urls}", "{decode_urls}"]
    else:
        workers = ["--worker-urls", "{worker_urls}"]
    return (*words, *workers, *to_flags(options))
