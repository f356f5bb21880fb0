"""The same recipe with the real SGLang as its engine, chosen by `topology` alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.engines.megatron.initial import run_write_random_model
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from tests.integration.command_line import SMALL, CommandLine

pytestmark = pytest.mark.timeout(400)
REPOSITORY = Path(__file__).parents[2]
CUT = ["rollout.sampling.temperature=0.7", "rollout.sampling.top_p=0.8", "rollout.sampling.top_k=12"]


def find_python() -> str:
    python = os.environ.get("RLRECIPES_SGLANG_PYTHON", str(REPOSITORY / ".venv-sglang" / "bin" / "python"))
    assert Path(python).exists(), "the real SGLang is missing: run `make sglang`"
    return python


def write_model(path: Path) -> None:
    """A small model whose generation_config.json would have it sampled in another way."""
    recipe = compose(SMALL)
    host = HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34)
    node = resolve(recipe.config, (host,), recipe.origins).model
    path.mkdir()
    build_char_tokenizer(alphabet=node.alphabet).save_pretrained(path)
    run_write_random_model(node, path)
    elsewise = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 2.0, "min_p": 0.5}
    (path / "generation_config.json").write_text(json.dumps(elsewise))


def test_one_step_with_the_real_sglang(tmp_path, monkeypatch, warm):
    """Trainer and engine agree at the recipe's temperature, top_p and top_k: the model's directory decides nothing."""
    monkeypatch.setenv("RLRECIPES_SGLANG_PYTHON", find_python())
    shell = CommandLine(tmp_path, warm)
    write_model(tmp_path / "model")
    try:
        small = [word for word in SMALL if not word.startswith(("deterministic=", "model."))]
        model = ["model=hf", "model.name=small", f"model.path={tmp_path / 'model'}"]
        words = ["name=run", "topology=sglang_cpu", "schedule.num_steps=1", *small, *model, *CUT]
        shell.run("train", *words, timeout_s=380)
        metrics = shell.metrics("run")
        assert sorted(metrics) == [0, 1]
        assert metrics[1]["weight_sync/is_verified"] == 1.0
        assert metrics[1]["rollout/failed_fraction"] == 0
        assert metrics[1]["train/rollout_logprob_abs_diff_max"] < 1e-4
        assert metrics[1]["train/grad_norm"] > 0
        assert shell.leftovers() == []
    finally:
        shell.close()


@pytest.mark.slow
def test_a_reference_served_by_the_real_sglang(tmp_path, monkeypatch, warm):
    """Serving the very weights that the policy starts from, it agrees with the trainer on every token."""
    monkeypatch.setenv("RLRECIPES_SGLANG_PYTHON", find_python())
    shell = CommandLine(tmp_path, warm)
    write_model(tmp_path / "model")
    try:
        left_out = ("deterministic=", "model.", "schedule.num_train_steps")
        small = [word for word in SMALL if not word.startswith(left_out)]
        model = ["model=hf", "model.name=small", f"model.path={tmp_path / 'model'}"]
        where = "topology.served_models.reference"
        group = f"{where}.server_groups.main"
        served = [
            f"+served_model@{where}=frozen",
            f"+server_group@{group}=sglang",
            f"{where}.path={tmp_path / 'model'}",
        ]
        served += [f"{group}.num_engines=1", f"{group}.python={find_python()}", f"{group}.start_timeout_s=300"]
        served += [f"+{group}.sglang.max_total_tokens=16384", "algo.kl.reference_model=reference"]
        shell.run("train", "name=run", "schedule.num_steps=2", *small, *model, *served, timeout_s=380)
        metrics = shell.metrics("run")
        assert metrics[1]["rollout/failed_fraction"] == metrics[2]["rollout/failed_fraction"] == 0
        assert metrics[1]["train/ref_kl"] < 1e-9
        assert metrics[2]["train/ref_kl"] > 1e-7
        assert shell.leftovers() == []
    finally:
        shell.close()
