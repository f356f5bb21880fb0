"""Exact command lines of servers and routers. Owns how native options become flags; starts nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import NativeOptions, RunConfig, ServerGroupConfig

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


def to_engine_command(group: ServerGroupConfig, config: RunConfig, number: int, index: int) -> tuple[str, ...]:
    """The command line of one engine, with placeholders for what only its host knows.

    Args:
        group: the server group.
        config: the recipe.
        number: of the engine in its group; a port the recipe names is the first engine's, the next takes the next.
        index: of the engine among all, which sets its seed.
    """
    module = "rlrecipes.engines.embedded.server" if group.engine == "embedded" else "sglang.launch_server"
    options = dict(group.sglang)
    first_port = options.pop("port", None)
    port = "{port}" if first_port is None else str(first_port + number)
    words = ["{python}", "-m", module, "--model-path", "{model_path}", "--host", _HOST, "--port", port]
    words += ["--dtype", config.model.dtype, "--random-seed", str(config.seed + index)]
    if group.gpus_per_engine > 1:
        words += ["--tp-size", str(group.gpus_per_engine)]
    native: NativeOptions = {}
    if config.deterministic:
        native["enable_deterministic_inference"] = True
    if group.engine == "sglang" and config.topology.device == "cpu":
        native |= _SGLANG_CPU
    return (*words, *to_flags(native | options))


def to_engine_env(group: ServerGroupConfig, config: RunConfig) -> dict[str, str]:
    """Environment of one engine; the recipe's own entries win.

    Args:
        group: the server group.
        config: the recipe.
    """
    env = {"HF_HUB_OFFLINE": "1"}
    if config.topology.device == "cpu":
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if group.engine == "sglang":
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": "{standins}"}
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


def to_router_command(native: NativeOptions, request_timeout_s: float) -> tuple[str, ...]:
    """The command line of the router in front of one model.

    Retries and the circuit breaker are off: a failed generation is the collector's to see, and a worker that
    answers slowly while weights are synced is not a broken one.

    Args:
        native: the recipe's router section.
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
    port = str(native.get("port", "{port}"))
    options = own | {name: value for name, value in native.items() if name != "port"}
    words = ["{python}", "-m", "sglang_router.launch_router", "--host", _HOST, "--port", port]
    return (*words, "--worker-urls", "{worker_urls}", *to_flags(options))
