"""The trainer on CUDA against itself on a CPU: the same loss, gradient and logprobs to the precision of the dtype."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def run_steps(device: str, dtype: str, path: str) -> dict[str, Any]:
    """Three GRPO steps; runs in a process of its own, since a rank sets up its process for one device."""
    from rank_group import SINGLE, build_model_node, build_samples, build_trainer_node, find_free_port

    from rlrecipes.algos.objective import compute_policy_objective
    from rlrecipes.batching.grid import build_grid
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
    trainer = build_trainer_node(SINGLE, needs_reference=True, device=device)
    node = build_model_node(dtype=dtype)
    rank = TrainerRank(trainer, node, rank=0, master_address="127.0.0.1", master_port=find_free_port())
    rank.load_hf(path)
    (row,) = build_grid(build_samples(14), num_ranks=1, max_tokens=96)
    before = rank.compute_logprobs(row, which="policy")
    steps = [rank.train_step(row, objective) for _ in range(3)]
    rank.close()
    return {"steps": steps, "logprobs": [values.tolist() for values in before]}


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rank_group import build_model_node, write_hf_model

    path = tmp_path_factory.mktemp("hf")
    write_hf_model(build_model_node(), path)
    return path


def run_alone(device: str, dtype: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, device, dtype, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def reference(hf_model: Path) -> dict[str, Any]:
    return run_alone("cpu", "float32", hf_model)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_loss_gradient_and_logprobs_are_those_of_the_cpu(
    hf_model: Path, reference: dict[str, Any], dtype: str, bound: float
) -> None:
    found = run_alone("cuda", dtype, hf_model)
    pairs = zip(found["logprobs"], reference["logprobs"], strict=True)
    difference = np.concatenate([np.abs(np.subtract(left, right)) for left, right in pairs])
    print(f"{dtype}: |logprob - CPU fp32| mean {difference.mean():.2e}, largest {difference.max():.2e}")
    for name in ("loss", "grad_norm"):
        values = [
            (step[name], expected[name]) for step, expected in zip(found["steps"], reference["steps"], strict=True)
        ]
        print(f"{dtype}: {name} " + ", ".join(f"{value:.6f} ({expected:.6f})" for value, expected in values))
        assert values[0][0] == pytest.approx(values[0][1], rel=bound, abs=bound / 10)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "megatron"))
    print(json.dumps(run_steps(*sys.argv[1:])))
