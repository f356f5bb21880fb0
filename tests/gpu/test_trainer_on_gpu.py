"""The trainer on CUDA against itself on a CPU in float32: the same loss, gradient and logprobs, to the precision of the
dtype, with local layers and with those of Transformer Engine, keeping activations and computing them again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
FIELDS: dict[str, dict[str, Any]] = {
    "nothing again": {},
    "attention again": {"recompute_granularity": "selective"},
    "layers again": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "deterministic": {"is_deterministic": True},
}
BOUNDS = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative, of loss and gradient norm of the first step; later ones start from other weights."""
NUM_SAMPLES, MAX_TOKENS = 56, 512
OFFSETS = (-0.45, -0.05, 0.05, 0.45)
"""Nats, from the policy's logprobs; the clip is at log 0.8 = -0.22 and log 1.28 = 0.25."""
ATTENTIONS = ("FlashAttention", "FusedAttention", "UnfusedDotProductAttention", "PackedAttention")
"""Classes that compute attention in Transformer Engine and here."""


def build_wide_node(dtype: str) -> Any:
    """Heads of a width that every fused attention has."""
    from rank_group import build_model_node

    node = build_model_node(dtype=dtype)
    return node.model_copy(update={"shapes": node.shapes.model_copy(update={"kv_channels": 64, "hidden_size": 64})})


def build_row(rank: Any, path: Path) -> Any:
    """Micro-batches whose old and reference logprobs are near the policy's, as in training; the CPU writes them first.

    Far from them the estimate of the KL is an exponential of large numbers, which multiplies what rounding does. Ratios
    lie on both sides of each bound of the clip, none where rounding could carry it over: there the gradient jumps.
    """
    from rank_group import build_samples

    from rlrecipes.batching.grid import build_grid, unpack_tokens

    samples = build_samples(NUM_SAMPLES)
    if not path.exists():
        rows = build_grid(samples, num_ranks=1, max_tokens=MAX_TOKENS)
        found = unpack_tokens(rows, [rank.compute_logprobs(rows[0], which="policy")], NUM_SAMPLES)
        np.savez(path, *found)
    rng = np.random.default_rng(1)

    def blur(logprobs: np.ndarray) -> np.ndarray:
        return (logprobs + rng.choice(OFFSETS, logprobs.shape)).astype(np.float32)

    with np.load(path) as near:
        samples = [
            replace(sample, old_logprobs=blur(near[name]), ref_logprobs=blur(near[name]))
            for sample, name in zip(samples, near, strict=True)
        ]
    return build_grid(samples, num_ranks=1, max_tokens=MAX_TOKENS)[0]


def run_steps(device: str, dtype: str, implementation: str, fields: dict[str, Any], path: str) -> dict[str, Any]:
    """Three GRPO steps."""
    from rank_group import SINGLE, build_trainer_node, find_free_port

    from rlrecipes.algos.objective import compute_policy_objective
    from rlrecipes.engines.megatron.rank import TrainerRank

    objective = partial(
        compute_policy_objective,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        kl_coef_in_loss=0.05,
        kl_estimator="k3",
        entropy_coef=0.01,
    )
    native = {"transformer_impl": implementation}
    trainer = build_trainer_node(SINGLE, needs_reference=True, device=device, megatron=native, **fields)
    rank = TrainerRank(
        trainer, build_wide_node(dtype), rank=0, master_address="127.0.0.1", master_port=find_free_port()
    )
    rank.load_hf(path)
    used: set[str] = set()
    for module in rank._policy.chunks[0].modules():
        if type(module).__name__ in ATTENTIONS:
            module.register_forward_hook(lambda module, *rest: used.add(type(module).__name__))
    row = build_row(rank, Path(path) / "near.npz")
    before = rank.compute_logprobs(row, which="policy")
    steps = [rank.train_step(row, objective) for _ in range(3)]
    parts = (row[:1], row[:3]) if device == "cuda" else ()
    waits = [find_waits(partial(rank.train_step, part, objective)) for part in parts]
    rank.close()
    return {
        "steps": steps,
        "logprobs": [values.tolist() for values in before],
        "attention": sorted(used),
        "waits": waits,
    }


def find_waits(step: Callable[[], Any]) -> list[str]:
    """Where torch made the CPU wait for the GPU."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return [f"{found.filename}:{found.lineno}" for found in told if "synchronizing" in str(found.message)]


def run_tasks(tasks: list[list[Any]]) -> list[Any]:
    """What each task found, or how it failed."""
    from rank_group import _leave_process_group

    answers: list[Any] = []
    for task in tasks:
        try:
            answers.append(run_steps(*task))
        except Exception:
            answers.append(traceback.format_exc())
        _leave_process_group()
    return answers


def run_alone(tasks: list[list[Any]]) -> list[Any]:
    """Tasks in a process of their own, since a rank sets up its process for one device."""
    # Transformer Engine multiplies float32 in TF32, whatever torch is told; only the driver's own switch stops that.
    environment = os.environ | {"NVIDIA_TF32_OVERRIDE": "0"}
    if tasks[0][0] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, __file__, json.dumps(tasks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rank_group import write_hf_model

    path = tmp_path_factory.mktemp("hf")
    # Near those of real models: five times larger ones make logits of which bfloat16 loses a tenth of a nat.
    write_hf_model(build_wide_node("float32"), path, spread=0.04)
    return path


@pytest.fixture(scope="module")
def reference(hf_model: Path) -> dict[str, Any]:
    (found,) = run_alone([["cpu", "float32", "local", {}, str(hf_model)]])
    assert isinstance(found, dict), found
    return found


@pytest.fixture(scope="module", params=["local", "transformer_engine"])
def on_gpu(
    request: pytest.FixtureRequest, hf_model: Path, reference: dict[str, Any]
) -> tuple[str, dict[tuple[str, str], Any]]:
    """The implementation, and what it found by dtype and what is computed again."""
    implementation = request.param
    if implementation == "transformer_engine" and not HAS_TRANSFORMER_ENGINE:
        pytest.skip("needs Transformer Engine")
    cases = [(dtype, name) for name in FIELDS for dtype in BOUNDS]  # what is deterministic stays so: it comes last
    tasks = [["cuda", dtype, implementation, FIELDS[name], str(hf_model)] for dtype, name in cases]
    return implementation, dict(zip(cases, run_alone(tasks), strict=True))


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_loss_gradient_and_logprobs_are_those_of_the_cpu(
    on_gpu: tuple[str, dict[tuple[str, str], Any]], reference: dict[str, Any], dtype: str, fields: str
) -> None:
    implementation, answers = on_gpu
    found, bound = answers[dtype, fields], BOUNDS[dtype]
    assert isinstance(found, dict), found
    pairs = zip(found["logprobs"], reference["logprobs"], strict=True)
    difference = np.concatenate([np.abs(np.subtract(left, right)) for left, right in pairs])
    where = f"{implementation}, {dtype}, {fields}"
    print(f"{where}: attention by {', '.join(found['attention'])}")
    print(f"{where}: |logprob - CPU fp32| mean {difference.mean():.2e}, largest {difference.max():.2e}")
    for name in ("loss", "grad_norm"):
        values, expected = ([step[name] for step in side["steps"]] for side in (found, reference))
        pairs = zip(values, expected, strict=True)
        print(f"{where}: {name} " + ", ".join(f"{value:.6f} ({right:.6f})" for value, right in pairs))
        assert values[0] == pytest.approx(expected[0], rel=bound)
    assert difference.mean() < bound


@pytest.mark.parametrize("fields", [name for name in FIELDS if name != "deterministic"])
def test_no_micro_batch_waits_for_the_one_before(on_gpu: tuple[str, Any], fields: str) -> None:
    found = on_gpu[1]["bfloat16", fields]
    assert isinstance(found, dict), found
    one, three = found["waits"]
    assert one, "the loss of a step is read, and that waits"
    assert sorted(three) == sorted(one)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "megatron"))
    print(json.dumps(run_tasks(json.loads(sys.argv[1]))))
