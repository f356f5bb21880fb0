"""A Plan as a job of KubeRay: a RayJob (ray.io/v1) and the ConfigMap that holds the Plan. Pure: asks nobody."""

from __future__ import annotations

import re
from collections import Counter
from importlib import metadata
from itertools import groupby
from typing import Any

from rlrecipes.errors import InputError
from rlrecipes.plan.nodes import HostNode, Plan

_PLAN_DIR = "/etc/rlrecipes"
_WORK_DIR = "/workspace"
_MAX_NAME_CHARACTERS = 47
"""KubeRay appends to it and still has to name a service."""
_MAX_CONFIG_MAP_BYTES = 1 << 20
_KEPT_S = 600
"""The cluster stays so long after the job, for who wants to look."""
_NUM_RETRIES = 3

type Document = dict[str, Any]


def to_kuberay(plan: Plan, *, image: str, claim: str | None, namespace: str | None) -> list[Document]:
    """What to give to ``kubectl apply``.

    The head pod is the Plan's first machine, where the run's driver starts; the others are workers. A pod has all GPUs
    of its machine and, as a request, a core for each process of the Plan; memory is left to the node.

    Args:
        plan: the Plan.
        image: of every pod; it holds rlrecipes and what the Plan's processes need.
        claim: a PersistentVolumeClaim, mounted as the working directory of every pod; None: what a run writes ends with
            its pods, and a job that failed is not tried again.
        namespace: of both objects; None: the one that kubectl is set to.

    Raises:
        InputError: the Plan does not fit into a ConfigMap, or its name cannot name a job.
    """
    name = _to_name(plan.name)
    text = plan.to_yaml()
    if len(text.encode()) > _MAX_CONFIG_MAP_BYTES - 1024:
        raise InputError("render", f"the Plan has {len(text):,} characters; a ConfigMap holds 1 MiB", "use fewer nodes")
    labels = {
        "app.kubernetes.io/name": "rlrecipes",
        "rlrecipes/plan": f"plan-{plan.hash}",
    }  # a bare hash may read as a number
    about = {"name": name, "labels": labels} | ({"namespace": namespace} if namespace is not None else {})
    num_processes = _count_processes(plan)
    pods = [_to_pod(host, num_processes[index], image, name, claim) for index, host in enumerate(plan.hosts)]
    cluster = {
        "rayVersion": metadata.version("ray"),
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": {"spec": pods[0]}},
        "workerGroupSpecs": _to_worker_groups(pods[1:]),
    }
    spec = {
        "entrypoint": f"rlrecipes run {_PLAN_DIR}/plan.yaml",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_S,
        "backoffLimit": _NUM_RETRIES if claim is not None else 0,  # the next try resumes from the last checkpoint
        "rayClusterSpec": cluster,
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"plan.yaml": text}},
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec},
    ]


def _to_name(name: str) -> str:
    """As a DNS label."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not re.match("[a-z]", label) or len(label) > _MAX_NAME_CHARACTERS:
        problem = f"{name!r} cannot name a job of KubeRay"
        fix = f"begin it with a letter, use at most {_MAX_NAME_CHARACTERS} characters: name=..."
        raise InputError("name", problem, fix)
    return label


def _count_processes(plan: Plan) -> Counter[int]:
    """Node -> processes of the Plan there, routers and the driver with its rest included."""
    found = Counter(device.node for device in plan.trainer.devices)
    for model in plan.served_models:
        found[model.router.devices[0].node] += 1
        processes = [process for engine in model.engines for process in (engine, *engine.followers)]
        found.update(process.devices[0].node for process in processes if process.devices)
    found[0] += 1
    return found


def _to_worker_groups(pods: list[Document]) -> list[Document]:
    """Machines in a row that are alike are one group."""
    groups = [(pod, len(list(alike))) for pod, alike in groupby(pods)]
    return [
        {
            "groupName": f"nodes-{number}",
            "replicas": count,
            "minReplicas": count,
            "maxReplicas": count,
            "rayStartParams": {},
            "template": {"spec": pod},
        }
        for number, (pod, count) in enumerate(groups)
    ]


def _to_pod(host: HostNode, num_processes: int, image: str, name: str, claim: str | None) -> Document:
    gpus = {"nvidia.com/gpu": host.num_gpus} if host.num_gpus else {}
    container: Document = {
        "name": "ray",
        "image": image,
        "workingDir": _WORK_DIR,
        "resources": {"requests": {"cpu": min(host.num_cpus, max(1, num_processes))} | gpus, "limits": gpus},
        "volumeMounts": [
            {"name": "plan", "mountPath": _PLAN_DIR, "readOnly": True},
            {"name": "work", "mountPath": _WORK_DIR},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # it would be 64 MiB
        ],
    }
    work: Document = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    volumes = [
        {"name": "plan", "configMap": {"name": name}},
        {"name": "work", **work},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {"containers": [container], "volumes": volumes}
