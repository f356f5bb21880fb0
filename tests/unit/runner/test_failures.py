"""How a run words what went wrong in a process of its own: a rank without memory, a rank or an engine that died."""

from __future__ import annotations

import asyncio
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError

from rlrecipes.engines.sglang.process import ServerProcess
from rlrecipes.errors import EngineError, TrainerError, WeightSyncError
from rlrecipes.runner.cluster import TrainerGroup
from rlrecipes.runner.servers import Serving

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is"
    " free. Process 7 has 120.00 GiB memory in use.\nOf the allocated memory 17.00 GiB is allocated by PyTorch, and"
    " 1.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def to_error(tmp_path, error, method="train_step", **trainer):
    facts = {"num_ranks": 1, "device": "cuda", "max_tokens_per_micro_batch": 16384, "recompute_granularity": None}
    group = TrainerGroup(SimpleNamespace(trainer=SimpleNamespace(**facts | trainer)), tmp_path, None)
    (problem,) = group._to_error(0, method, error).problems
    assert problem.where == "trainer rank 0"
    return problem


def in_task(cause):
    """As it comes back from an actor: pickled, inside of Ray's own."""
    return RayTaskError("train_step", "Traceback ...", pickle.loads(pickle.dumps(cause)))


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "Tried to allocate 3.00 GiB"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cublasCreate"),
    ],
)
def test_a_rank_without_gpu_memory_says_so_in_one_line_and_what_to_lower(tmp_path, cause, says):
    problem = to_error(tmp_path, in_task(cause))
    assert problem.problem.startswith("out of GPU memory in train_step: ") and says in problem.problem
    assert "lower parallel.max_tokens_per_micro_batch (16384), set parallel.recompute_granularity=full" in problem.fix
    assert "PYTORCH_ALLOC_CONF" not in problem.problem and "\n" not in problem.problem + problem.fix
    assert "recompute" not in to_error(tmp_path, in_task(cause), recompute_granularity="full").fix


def test_memory_that_is_not_there_when_the_turn_comes_is_somebody_elses(tmp_path):
    problem = to_error(tmp_path, in_task(torch.OutOfMemoryError(OUT_OF_MEMORY)), "reload")
    assert "in reload" in problem.problem and problem.fix.startswith("end other processes on the GPU")


def test_other_errors_keep_their_words_and_a_dead_rank_shows_the_end_of_its_log(tmp_path):
    assert to_error(tmp_path, in_task(ValueError("no"))).problem == "train_step raised ValueError: no"
    on_cpu = to_error(tmp_path, in_task(RuntimeError("out of memory")), device="cpu")
    assert on_cpu.problem == "train_step raised RuntimeError: out of memory"
    (tmp_path / "trainer-0.log").write_text("step 1\nstep 2\n")
    died = to_error(tmp_path, RayActorError())
    assert died.problem == (
        f"its process died during train_step; the end of {tmp_path}/trainer-0.log:\n        step 1\n        step 2"
    )


def serve(tmp_path, code):
    """Serving of one process, which is no server."""
    serving = Serving(SimpleNamespace(run_dir=str(tmp_path), served_models=()), print)
    process = ServerProcess("policy-main-0", [sys.executable, "-c", code], {}, tmp_path / "log")
    serving._models["policy"] = SimpleNamespace(check_alive=process.check_alive)
    return serving, process


def fail_inside(serving, error):
    async def run():
        async with serving.naming_deaths():
            raise error

    asyncio.run(run())


LOST = "/resume_memory_occupation could not be reached: Server disconnected"


@pytest.mark.parametrize("kind", [EngineError, WeightSyncError])
def test_a_call_that_fails_because_its_engine_died_names_the_engine_and_its_log(tmp_path, kind):
    code = "import time; print('CUresult error: 2 out of memory', flush=True); time.sleep(0.3); raise SystemExit(9)"
    serving, process = serve(tmp_path, code)
    with pytest.raises(EngineError, match="engine policy-main-0: ended with exit code 9") as caught:
        fail_inside(serving, kind("engine http://127.0.0.1:1", LOST, "the server may have died"))
    assert "out of memory" in str(caught.value) and "less memory" in str(caught.value)
    process.stop()


@pytest.mark.parametrize("error", [WeightSyncError("weights", "differ", "x"), TrainerError("train", "died", "x")])
def test_an_error_stays_where_no_engine_died(tmp_path, monkeypatch, error):
    monkeypatch.setattr("rlrecipes.runner.servers._DEATH_S", 0.3)
    serving, process = serve(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(type(error)) as caught:
        fail_inside(serving, error)
    assert caught.value is error
    process.stop()
