"""The manifest of a Plan: judged by the schemas of Kubernetes and KubeRay, and it holds the Plan as `run` reads it."""

from __future__ import annotations

import copy
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from rlrecipes.cli.render import run
from rlrecipes.config.compose import compose
from rlrecipes.errors import InputError
from rlrecipes.plan.nodes import load_plan
from rlrecipes.runner.kuberay import to_kuberay
from rlrecipes.runner.resolution import resolve_recipe

SCHEMA = yaml.safe_load(Path(__file__).with_name("rayjob_schema.yaml").read_text())
KUBERNETES = "1.31"


def render(capsys, *words):
    run(["kuberay", "--image", "example.org/rlrecipes:1", *words])
    printed = capsys.readouterr()
    documents = list(yaml.safe_load_all(printed.out))
    check(documents)
    return documents, printed.err


def check(documents):
    config_map, job = documents
    jsonschema.validate(job, SCHEMA)
    kubernetes_validate.validate(config_map, KUBERNETES, strict=True)
    for template in templates_of(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a-pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def templates_of(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def resources_of(template):
    (container,) = template["spec"]["containers"]
    return container["resources"]


def test_machines_and_gpus_of_a_plan(capsys):
    (_, job), _ = render(capsys, "recipe=qwen3_4b", "cluster=h100_8x4", "--claim", "work", "--namespace", "ml")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    assert [resources_of(one)["limits"] for one in templates_of(job)] == [{"nvidia.com/gpu": 8}] * 2
    assert resources_of(cluster["headGroupSpec"]["template"])["requests"]["cpu"] > 1
    assert job["metadata"]["name"] == "qwen3-4b" and job["metadata"]["namespace"] == "ml"
    assert job["spec"]["backoffLimit"] == 3


def test_the_config_map_holds_the_plan_that_the_entrypoint_runs(capsys, tmp_path):
    words = ["recipe=quickstart_sft", "model.alphabet='abc: |#\"'"]
    (config_map, job), said = render(capsys, *words)
    (tmp_path / "plan.yaml").write_text(config_map["data"]["plan.yaml"])
    assert load_plan(tmp_path / "plan.yaml").hash == resolve_recipe(compose(words)).hash
    (container,) = templates_of(job)[0]["spec"]["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert job["spec"]["entrypoint"] == f"rlrecipes run {mounted['plan']}/plan.yaml"
    volumes = {volume["name"]: volume for volume in templates_of(job)[0]["spec"]["volumes"]}
    assert volumes["plan"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert container["workingDir"] == mounted["work"] and volumes["work"] == {"name": "work", "emptyDir": {}}
    assert job["spec"]["backoffLimit"] == 0 and "ends with its pods" in said
    assert resources_of(templates_of(job)[0])["limits"] == {}
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"] == []


def test_machines_that_differ_are_groups_of_their_own():
    plan = resolve_recipe(compose(["recipe=qwen3_4b", "cluster=h100_8x4"]))
    last = plan.hosts[3].model_copy(update={"num_gpus": 4})
    mixed = plan.model_copy(update={"hosts": (*plan.hosts[:3], last)})
    documents = to_kuberay(mixed, image="i", claim=None, namespace=None)
    check(documents)
    groups = documents[1]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(group["groupName"], group["replicas"]) for group in groups] == [("nodes-0", 2), ("nodes-1", 1)]


@pytest.mark.parametrize("name", ["1st", "___", "a" * 48])
def test_a_name_that_kubernetes_does_not_take(name):
    plan = resolve_recipe(compose([f"name='{name}'"]))
    with pytest.raises(InputError, match="cannot name a job"):
        to_kuberay(plan, image="i", claim=None, namespace=None)


def test_a_plan_that_is_too_large():
    plan = resolve_recipe(compose())
    large = plan.model_copy(update={"notes": ("x" * (1 << 20),)})
    with pytest.raises(InputError, match="ConfigMap holds 1 MiB"):
        to_kuberay(large, image="i", claim=None, namespace=None)


def test_the_schemas_refuse_what_is_wrong():
    documents = to_kuberay(resolve_recipe(compose()), image="i", claim=None, namespace=None)
    for path, value in {
        ("spec", "entrypont"): "x",
        ("spec", "backoffLimit"): "3",
        ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "volume"): [],
        ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers"): [{"image": "i"}],
        ("metadata", "labels"): {"plan": 686e7},
    }.items():
        wrong = copy.deepcopy(documents)
        *parents, last = path
        here = wrong[1]
        for step in parents:
            here = here[step]
        here[last] = value
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check(wrong)
