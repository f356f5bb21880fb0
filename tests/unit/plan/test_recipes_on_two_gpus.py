"""The recipes of benchmarks/gpu/two_gpus.py, resolved: what would lie where, and how weights would travel."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.plan.cluster import read_cluster
from rlrecipes.plan.resolve import resolve

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
WHOLE = LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SPLIT = LLAMA | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
PLACES = {
    "disaggregated": ({"0": ["trainer rank 0"], "1": ["policy-main-0"]}, "NCCL"),
    "pd": (
        {"0": ["trainer rank 0", "policy-prefill-0"], "1": ["trainer rank 1", "policy-decode-0"]},
        "handles of GPU memory",
    ),
    "tp2": (
        {"0": ["trainer rank 0", "policy-main-0"], "1": ["trainer rank 1", "policy-main-0"]},
        "handles of GPU memory",
    ),
}


@pytest.fixture(scope="module")
def two_gpus():
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu"))
    yield importlib.import_module("two_gpus")
    sys.path.pop(0)


@pytest.mark.parametrize("name", PLACES)
def test_each_variant_lies_where_its_script_says(two_gpus, name, tmp_path):
    variant = two_gpus.VARIANTS[name]
    (tmp_path / "config.json").write_text(json.dumps(SPLIT if variant.is_split else WHOLE))
    recipe, problems = compose(two_gpus.build_overrides(variant, str(tmp_path), tmp_path / "run")), []
    cluster = read_cluster(recipe.config.cluster, recipe.config.runs_dir, problems, lambda address: ())
    plan = resolve(recipe.config, cluster.hosts, recipe.origins, recipe.problems, problems, cluster=cluster.node)
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    places, transport = PLACES[name]
    assert two_gpus.describe_plan(tmp_path / "plan.yaml") == {"gpus": places, "transport": transport}
    commands = [" ".join(engine.command) for engine in plan.policy.engines]
    assert all(("--enable-memory-saver" in command) == (name == "tp2") for command in commands)
    assert all(("--disaggregation-transfer-backend nixl" in command) == (name == "pd") for command in commands)
