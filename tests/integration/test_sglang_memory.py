"""Bytes of a token in an engine's KV cache, against the code of SGLang itself."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.config.schema import ModelConfig
from rlrecipes.plan.model_costs import compute_kv_bytes_per_token

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("RLRECIPES_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
STANDINS = ROOT / "rlrecipes" / "engines" / "sglang" / "standins"
DTYPES = {"bfloat16": 2, "float8_e4m3fn": 1}
CASES = [
    ("qwen2_5_0_5b", 1, "bfloat16"),
    ("qwen2_5_0_5b", 4, "bfloat16"),  # fewer heads than ranks: each has one
    ("llama3_1_8b", 2, "bfloat16"),
    ("qwen3_30b_a3b", 2, "float8_e4m3fn"),
    ("qwen3_30b_a3b", 8, "bfloat16"),
    ("qwen3_next_80b_a3b", 2, "bfloat16"),
    ("deepseek_r1", 1, "bfloat16"),
    ("deepseek_r1", 8, "float8_e4m3fn"),
    ("deepseek_v3_2", 8, "bfloat16"),
    ("deepseek_v3_2", 8, "float8_e4m3fn"),
    ("glm5_744b_a40b", 4, "bfloat16"),
]
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}

sys.path.insert(0, str(ROOT / "tests" / "unit" / "plan"))
from hf_configs import to_config_json  # noqa: E402


@functools.cache
def load(name: str) -> ModelConfig:
    return compose([f"model={name}"]).config.model


@pytest.mark.skipif(not PYTHON.is_file(), reason="needs SGLang's environment: make sglang")
def test_kv_cache_bytes_are_sglangs(tmp_path: Path) -> None:
    for name in {case[0] for case in CASES}:
        (tmp_path / name).mkdir()
        config = to_config_json(load(name)) | {"architectures": [ARCHITECTURES[load(name).family]]}
        config["full_attention_interval"] = load(name).shapes.linear_attention_freq  # as its own files say it
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    asked = json.dumps([[str(tmp_path / name), tp, dtype] for name, tp, dtype in CASES])
    script = Path(__file__).with_name("sglang_cell_sizes.py")
    environment = os.environ | {"PYTHONPATH": str(STANDINS), "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(
        [str(PYTHON), str(script), asked], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    theirs = json.loads(answer.stdout.splitlines()[-1])
    ours = [compute_kv_bytes_per_token(load(name).shapes, tp, DTYPES[dtype]) for name, tp, dtype in CASES]
    assert dict(zip(CASES, ours, strict=True)) == dict(zip(CASES, theirs, strict=True))
