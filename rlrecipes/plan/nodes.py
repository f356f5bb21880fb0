"""The Plan: everything the Runner needs and nothing it must decide. Owns its shape, its hash and its YAML.

Nodes that a recipe states outright are the recipe's own sections; the rest is derived by resolve.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from rlrecipes.config.origins import origin_of
from rlrecipes.config.schema import (
    ClusterSource,
    DataConfig,
    EngineKind,
    Family,
    GpuConfig,
    ModelShapes,
    NativeOptions,
    OptimConfig,
    PlacementKind,
    PrunerConfig,
    RewardConfig,
    RlConfig,
    RolloutConfig,
    ScheduleConfig,
    Section,
    SftConfig,
    TrackingConfig,
    WeightSyncConfig,
    WorkerType,
)
from rlrecipes.config.validation import to_problems
from rlrecipes.errors import ConfigError
from rlrecipes.plan.difference import RECORD
from rlrecipes.plan.memory_nodes import MemoryNode
from rlrecipes.plan.packing import compute_micro_batch_multiple, compute_sample_multiple
from rlrecipes.plan.predictions import StepTimeNode

PLAN_VERSION = 1
POLICY = "policy"
"""Name of the served model that is being trained."""


class DeviceNode(Section):
    """One place a process may own.

    Attributes:
        node: index into ``Plan.nodes``.
        gpu: index on that node; None on CPU.
    """

    node: int
    gpu: int | None


class HostNode(Section):
    """One machine of the cluster."""

    name: str
    num_cpus: int
    num_gpus: int
    memory_bytes: int


class ClusterNode(Section):
    """What the machines have in common."""

    name: str
    source: ClusterSource
    gpu: GpuConfig | None
    """What each GPU is; None: nothing is said of memory and time."""
    nic_bytes_per_s: float
    """Network of one GPU to other nodes, one direction."""
    disk_bytes: int | None
    """Free under runs_dir when the Plan was made; None: unknown."""
    address: str | None = None
    """Of the Ray cluster that the run joins; None: of no other's."""
    gpu_hour_price: float | None
    """Price of one GPU for an hour; None: not told."""


class ModelNode(Section):
    """The trained model, its facts settled."""

    name: str
    family: Family
    path: str
    """HF directory; made at start when ``is_random``; empty where the model is known by its facts alone."""
    is_random: bool
    init_seed: int
    alphabet: str | None
    shapes: ModelShapes
    dtype: Literal["float32", "bfloat16"]
    num_parameters: int
    flops_per_token: float
    """Forward and backward, without attention's quadratic part."""


class CriticNode(Section):
    """The value model, in the trainer's processes and layout."""

    path: str | None
    """HF directory its layers start from; None: the policy's."""
    optim: OptimConfig
    num_train_steps_total: int
    """Length of its learning-rate schedule, warm-up steps of the run included."""


class TrainerNode(Section):
    """The trainer ranks and what each is built with."""

    device: Literal["cpu", "cuda"]
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    data_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    sequence_parallel: bool
    recompute_granularity: Literal["selective", "full"] | None
    recompute_method: Literal["uniform", "block"] | None
    recompute_num_layers: int | None
    recompute_modules: tuple[str, ...]
    optimizer_cpu_offload: bool
    max_tokens_per_micro_batch: int
    num_threads: int
    is_deterministic: bool
    needs_reference: bool
    seed: int
    temperature: float
    """Divides the logits of every trainer logprob, as the engine does."""
    top_p: float = 1.0
    """Trainer logprobs are of the tokens it keeps, as the engine's samples are."""
    top_k: int = -1
    """The same; -1 keeps all."""
    num_train_steps_total: int
    """Length of the policy's learning-rate schedule."""
    optim: OptimConfig
    teacher_path: str | None
    """HF directory of the weights that the policy is distilled from; null: none."""
    critic: CriticNode | None
    """Built, trained and saved beside the policy; None: there is none."""
    megatron: NativeOptions
    devices: tuple[DeviceNode, ...]
    """[num_ranks], in rank order (TP fastest, then CP, DP, PP)."""

    @property
    def num_ranks(self) -> int:
        """Trainer processes."""
        return len(self.devices)

    @property
    def sample_multiple(self) -> int:
        """Each sample is padded to a multiple of so many tokens."""
        return compute_sample_multiple(self.context_parallel_size)

    @property
    def micro_batch_multiple(self) -> int:
        """Each micro-batch is padded to a multiple of so many tokens."""
        return compute_micro_batch_multiple(
            self.tensor_model_parallel_size, self.context_parallel_size, self.sequence_parallel
        )

    @property
    def num_micro_batches_multiple(self) -> int:
        """Each rank gets a multiple of so many micro-batches: model chunks take turns in groups of PP."""
        return self.pipeline_model_parallel_size if self.num_model_chunks > 1 else 1

    @property
    def num_model_chunks(self) -> int:
        """Of one rank; more than one shorten the pipeline's bubble."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def max_micro_batch_tokens(self) -> int:
        """Most tokens of a micro-batch over all CP ranks; also the longest trainable sample."""
        return self.max_tokens_per_micro_batch * self.context_parallel_size

    @property
    def weight_sources(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that gather weights, stage by stage, the first sends: a replica of all layers and of all experts."""
        tp = self.tensor_model_parallel_size
        num_gathering = math.lcm(tp, self.expert_tensor_parallel_size * self.expert_model_parallel_size)
        starts = range(0, self.num_ranks, tp * self.context_parallel_size * self.data_parallel_size)
        return tuple(tuple(range(start, start + num_gathering)) for start in starts)


class ProcessNode(Section):
    """One process to start.

    ``command`` may hold ``{python}``, ``{host}``, ``{port}``, ``{metrics_port}``, ``{bootstrap_port}``,
    ``{dist_init_addr}``, ``{model_path}``, ``{encoder_urls}``, ``{worker_urls}``, ``{prefill_urls}`` and
    ``{decode_urls}``, filled in when it is started; ``env`` may hold ``{standins}``.
    """

    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    python: str | None
    devices: tuple[DeviceNode, ...]
    start_timeout_s: float
    followers: tuple[ProcessNode, ...] = ()
    """Processes of the same engine on further nodes, in rank order."""


class ServerGroupNode(Section):
    """Engines with the same worker type and layout."""

    name: str
    worker_type: WorkerType
    engine: EngineKind
    placement: PlacementKind
    gpus_per_engine: int
    pipeline_parallel_size: int
    attention_data_parallel_size: int
    expert_parallel_size: int
    engines: tuple[ProcessNode, ...]
    """Started by the run; none of an external group or a placeholder."""
    urls: tuple[str, ...]
    """Of engines that others run."""
    sglang: NativeOptions
    """The engine's own options, as they stand in its command line too."""
    reserved: tuple[DeviceNode, ...]
    """Devices that a placeholder keeps free."""


class ServedModelNode(Section):
    """One model, its engines, and the router in front of them."""

    name: str
    path: str
    is_updated: bool
    router: ProcessNode
    num_joining_engines: int
    join_timeout_s: float
    server_groups: tuple[ServerGroupNode, ...]

    @property
    def engines(self) -> tuple[ProcessNode, ...]:
        """Engines that the run starts, of all groups, in order."""
        return tuple(engine for group in self.server_groups for engine in group.engines)


class BatchNode(Section):
    """Batch arithmetic, exact.

    ``rollouts_per_step = prompts_per_step x group_size = rollouts_per_train_step x num_train_steps``.
    """

    prompts_per_step: int
    group_size: int
    rollouts_per_step: int
    num_train_steps: int
    prompts_per_train_step: int
    rollouts_per_train_step: int
    max_sample_tokens: int


class SyncRouteNode(Section):
    """From the trainer to one updated model."""

    served_model: str
    transport: Literal["tensor", "distributed", "disk"]
    num_receiving_ranks: int
    """Of engines that the run starts; those of others are counted when it meets them."""


class Plan(Section):
    """The resolved, frozen, hashable description of a run."""

    version: int
    name: str
    run_dir: str
    runs_dir: str
    resume: Literal["auto", "never", "required", "accept_changes"]
    seed: int
    is_deterministic: bool
    cluster: ClusterNode
    hosts: tuple[HostNode, ...]
    model: ModelNode
    algo: Annotated[RlConfig | SftConfig, Field(discriminator="kind")]
    batch: BatchNode
    trainer: TrainerNode
    should_offload_trainer: bool
    """Whether the trainer gives its GPU memory back while colocated engines work."""
    should_offload_engines: bool
    """Whether colocated engines give theirs back while the trainer works."""
    served_models: tuple[ServedModelNode, ...]
    weight_sync: WeightSyncConfig
    sync_routes: tuple[SyncRouteNode, ...]
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    schedule: ScheduleConfig
    tracking: TrackingConfig
    pruner: PrunerConfig | None
    """What stops the run early, where it is a point of a sweep; a sweep goes on with or without it."""
    notes: tuple[str, ...]
    """What a reader should know: consequences of the choices made."""
    memory: MemoryNode | None
    """Predicted of every kind of GPU; None where nothing is known of the GPUs, or there are none."""
    step_time: StepTimeNode | None
    """Of one step, predicted; None: no GPU is described, or others run the engines."""
    changes: dict[str, Any]
    """Recipe values that the defaults did not set, by dotted path."""
    choices: dict[str, str]
    """Group -> option of conf/ that the recipe chose."""
    provenance: dict[str, str]
    """Dotted path of a recipe value -> where it was set."""

    @property
    def policy(self) -> ServedModelNode | None:
        """The served model being trained; None where nothing is served (SFT without evaluation)."""
        return next((model for model in self.served_models if model.name == POLICY), None)

    @property
    def shares_gpus(self) -> bool:
        """Whether any served model has a group on the trainer's GPUs, so that memory may change hands."""
        return any(group.placement == "colocated" for model in self.served_models for group in model.server_groups)

    @property
    def kept_devices(self) -> set[DeviceNode]:
        """Of trainer and engines, and those that placeholders keep free."""
        groups = [group for model in self.served_models for group in model.server_groups]
        parts = [part for group in groups for engine in group.engines for part in (engine, *engine.followers)]
        owners = [self.trainer.devices, *(part.devices for part in parts), *(group.reserved for group in groups)]
        return {device for devices in owners for device in devices}

    @property
    def num_used_gpus(self) -> dict[int, int]:
        """Machine -> GPUs that are kept of it, from the first on; machines of which nothing is kept are left out."""
        used: dict[int, int] = {}
        for device in sorted(self.kept_devices, key=lambda device: device.node):
            used[device.node] = max(used.get(device.node, 0), 0 if device.gpu is None else device.gpu + 1)
        return used

    def to_data(self) -> dict[str, Any]:
        """Plain data of the whole Plan."""
        data: dict[str, Any] = json.loads(self.model_dump_json())
        return data

    def to_execution(self) -> dict[str, Any]:
        """Plain data of what runs: without notes, predictions, and how the recipe came about."""
        return {name: value for name, value in self.to_data().items() if name not in RECORD}

    def describe_changes(self) -> str:
        """What differs from the defaults, a line each, with where it was set."""
        lines = (
            f"{path}: {json.dumps(value)}  # {origin_of(self.provenance, path)}" for path, value in self.changes.items()
        )
        return "\n".join(lines) + "\n"

    def to_yaml(self) -> str:
        """YAML that :func:`load_plan` reads back to an equal Plan."""
        return yaml.safe_dump(self.to_data(), sort_keys=False, allow_unicode=True, width=120)

    @property
    def hash(self) -> str:
        """16 hex digits over everything that runs; equal Plans run equally."""
        data = self.to_execution()
        for name in ("disk_bytes", "gpu_hour_price"):
            del data["cluster"][name]
        del data["pruner"]
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def load_plan(path: Path) -> Plan:
    """Read a Plan saved as YAML.

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a Plan of this version.
    """
    fix = "save one with `rlrecipes plan recipe=... --save plan.yaml`"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", fix) from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(where, f"is not YAML: {getattr(error, 'problem', error)}", fix) from error
    if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
        raise ConfigError(str(path), f"is not a Plan of version {PLAN_VERSION}", fix)
    try:
        return Plan.model_validate_json(json.dumps(data))
    except ValidationError as error:
        origins = {name: str(path) for name in Plan.model_fields | data}
        raise ConfigError.from_problems(to_problems(error, data, origins, Plan)) from error
    except TypeError as error:
        raise ConfigError(str(path), f"is not a valid Plan: {error}", fix) from error
