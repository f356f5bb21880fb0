"""Layouts of the trainer on CUDA, a process a GPU, against one GPU; where there is one, with Transformer Engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
DTYPE = "bfloat16" if HAS_TRANSFORMER_ENGINE else "float32"
"""Fused attention, which the ring needs, has no float32."""
BOUNDS = {"loss": 1e-2, "entropy": 1e-2, "grad_norm": 3e-2} if HAS_TRANSFORMER_ENGINE else {}
"""Of the first step, relative; bfloat16 sums in another order. Float32 is held to 1e-5."""
LAYOUTS = ["CP2", "PP2_VPP2", "DP2", *(["TP2_SP"] if HAS_TRANSFORMER_ENGINE else [])]  # the local norm refuses SP


def run_rank(
    rank: int, port: int, device: str, dtype: str, layout: dict[str, Any], is_offloaded: bool, path: str
) -> Any:
    """Three GRPO steps of one rank; then a checkpoint, two steps, and the same two again after loading it."""
    from rank_group import Layout, build_samples, build_trainer_node

    from rlrecipes.algos.objective import compute_policy_objective
    from rlrecipes.engines.megatron.rank import TrainerRank

    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "kl_coef_in_loss": 0.05, "kl_estimator": "k3"}
    objective = partial(compute_policy_objective, entropy_coef=0.01, **options)
    own = Layout(**layout)
    native = {} if HAS_TRANSFORMER_ENGINE and device == "cuda" else {"transformer_impl": "local"}
    trainer = build_trainer_node(
        own, needs_reference=True, device=device, optimizer_cpu_offload=is_offloaded, megatron=native
    )
    trainer_rank = TrainerRank(trainer, build_wide_node(dtype), rank=rank, master_address="127.0.0.1", master_port=port)
    trainer_rank.load_hf(path)
    row = own.build_rows(build_samples(14))[own.row_of(rank)]
    before = trainer_rank.compute_logprobs(row, which="policy")
    steps = [trainer_rank.train_step(row, objective) for _ in range(3)]
    saved = Path(path).parent / f"saved-{port}"
    trainer_rank.save_checkpoint(saved)
    after = [trainer_rank.train_step(row, objective) for _ in range(2)]
    trainer_rank.load_checkpoint(saved)
    again = [trainer_rank.train_step(row, objective) for _ in range(2)]
    trainer_rank.close()
    return {"before": [values.tolist() for values in before], "steps": steps, "after": after, "again": again}


def build_wide_node(dtype: str) -> Any:
    """Heads of a width that fused attention has."""
    from rank_group import build_model_node

    node = build_model_node(dtype=dtype)
    return node.model_copy(update={"shapes": node.shapes.model_copy(update={"kv_channels": 64, "hidden_size": 64})})


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rank_group import write_hf_model

    path = tmp_path_factory.mktemp("hf") / "model"
    write_hf_model(build_wide_node("float32"), path)
    return path


def run_all(layout: Any, path: Path, *, device: str = "cuda", dtype: str = DTYPE, is_offloaded: bool = False) -> Any:
    from rank_group import find_free_port

    port, processes = find_free_port(), []
    for rank in range(layout.num_ranks):
        task = json.dumps([rank, port, device, dtype, asdict(layout), is_offloaded, str(path)])
        env = os.environ | {"CUDA_VISIBLE_DEVICES": str(rank), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        processes.append(subprocess.Popen([sys.executable, __file__, task], stdout=-1, stderr=-1, text=True, env=env))
    answers = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(error[-3000:] for _, error in answers)
    return [json.loads(output.splitlines()[-1]) for output, _ in answers]


@pytest.fixture(scope="module")
def single(hf_model: Path) -> Any:
    from rank_group import SINGLE

    (found,) = run_all(SINGLE, hf_model)
    return found


def compare(found: dict[str, Any], expected: dict[str, Any], bounds: dict[str, float]) -> None:
    names = ("loss", "grad_norm", "entropy")
    for name in names:
        pairs = [(step[name], other[name]) for step, other in zip(found["steps"], expected["steps"], strict=True)]
        print(f"{name} " + ", ".join(f"{value:.6f} ({wanted:.6f})" for value, wanted in pairs))
    for name in names:
        assert found["steps"][0][name] == pytest.approx(expected["steps"][0][name], rel=bounds.get(name, 1e-5))
    for step, other in zip(found["again"], found["after"], strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.skipif(HAS_TRANSFORMER_ENGINE, reason="a CPU has none, and float32 is not fused")
def test_one_gpu_computes_what_a_cpu_does(hf_model: Path, single: Any) -> None:
    from rank_group import SINGLE

    (cpu,) = run_all(SINGLE, hf_model, device="cpu", dtype="float32")
    compare(single, cpu, BOUNDS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_gpus_compute_what_one_does(name: str, hf_model: Path, single: Any) -> None:
    import rank_group
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layout = getattr(rank_group, name)
    found = run_all(layout, hf_model)
    assert all(part["steps"] == found[0]["steps"] for part in found)
    logprobs, expected = (sort_by_sample(parts, own) for parts, own in ((found, layout), ([single], rank_group.SINGLE)))
    difference = np.concatenate([np.abs(a - b) for a, b in zip(logprobs, expected, strict=True)])
    print(f"{name}: |logprob - one GPU's| mean {difference.mean():.2e}, largest {difference.max():.2e}")
    compare(found[0], single, BOUNDS)
    assert difference.mean() < BOUNDS.get("loss", 1e-5)


def sort_by_sample(parts: list[dict[str, Any]], layout: Any) -> list[np.ndarray]:
    from rank_group import build_samples

    from rlrecipes.batching.grid import unpack_tokens

    answers = [[np.array(values) for values in part["before"]] for part in parts if part["before"]]
    return unpack_tokens(layout.build_rows(build_samples(14)), answers, 14)


@pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="needs Transformer Engine")
def test_an_offloaded_optimizer_steps_as_one_on_the_gpu(hf_model: Path) -> None:
    from rank_group import SINGLE

    (kept,) = run_all(SINGLE, hf_model, dtype="bfloat16")
    (offloaded,) = run_all(SINGLE, hf_model, dtype="bfloat16", is_offloaded=True)
    compare(offloaded, kept, {})
    for step, expected in zip(offloaded["steps"], kept["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-2)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "megatron"))
    print(json.dumps(run_rank(*json.loads(sys.argv[1]))))
