"""The machines a recipe is resolved for (conf/cluster)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrecipes.config.schema.section import PositiveFloat, PositiveInt, Section

ClusterSource = Literal["described", "host", "ray", "slurm"]


class GpuConfig(Section):
    """One kind of GPU, by its maker's figures (conf/gpu)."""

    name: str
    """As people know it, e.g. H200-SXM."""
    device_names: tuple[str, ...]
    """As its driver, Ray or a SLURM administrator may call it beside `name`; case, spaces and a leading NVIDIA do not
    count."""
    memory_bytes: PositiveInt
    """What a process can have of it."""
    bf16_flops_per_s: PositiveFloat
    """Dense bf16 matrix multiplication."""
    fp8_flops_per_s: PositiveFloat | None
    """Dense fp8 matrix multiplication; null: it has none."""
    hbm_bytes_per_s: PositiveFloat
    """Its memory's bandwidth."""
    nvlink_bytes_per_s: PositiveFloat
    """To the other GPUs of its node, one direction; PCIe's where it has no NVLink."""
    source: str
    """Where the figures stand."""


class ClusterConfig(Section):
    """The machines, all alike (conf/cluster)."""

    name: str
    """Name in tables; described nodes are called <name>-0, <name>-1 ..."""
    source: ClusterSource
    """described: what stands here. host: this machine. ray: the Ray cluster at `address`. slurm: the idle and busy
    nodes of `partition`. What is read need not stand here; where it does, it must agree."""
    address: str | None
    """Of the Ray cluster, host:port or auto."""
    partition: str | None
    """Of SLURM; null: the default one."""
    num_nodes: Annotated[int, Field(ge=1, le=1 << 15)] | None
    """Machines; of what is read: how many are used, those with most GPUs first; null: all."""
    gpus_per_node: Annotated[int, Field(ge=0, le=128)] | None
    """GPUs of one machine."""
    cpus_per_node: PositiveInt | None
    """Cores of one machine, as its operating system counts them."""
    memory_bytes_per_node: PositiveInt | None
    """Main memory of one machine."""
    disk_bytes: PositiveInt | None
    """Free space under runs_dir; null: this machine's is read where source is host, else it is not judged."""
    gpu_hour_price: PositiveFloat | None
    """Price of one GPU for an hour, in a currency of your choice, for reports and comparisons; null: none is told."""
    nic_bytes_per_s: PositiveFloat
    """Network of one GPU to other nodes, one direction."""
    gpu: GpuConfig | None
    """What each GPU is, chosen with gpu@cluster.gpu=NAME; null: read where it can be, else nothing is said of memory
    and time."""
