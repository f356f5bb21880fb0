"""Layouts of the trainer: what is refused and why, and what follows from one."""

from __future__ import annotations

import numpy as np
import pytest

from rlrecipes.batching.grid import build_grid
from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan.layouts import iter_parallel
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.packing import compute_micro_batch_multiple, compute_sample_multiple
from rlrecipes.plan.resolve import resolve
from rlrecipes.types import Sample

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
FULL = ["parallel.recompute_granularity=full", "parallel.recompute_method=uniform", "parallel.recompute_num_layers=1"]
SELECTIVE = "parallel.recompute_granularity=selective"
VPP = "parallel.virtual_pipeline_model_parallel_size"


def plan_of(*overrides):
    recipe = compose(overrides)
    return resolve(recipe.config, HOSTS, recipe.origins)


def problems_of(*overrides):
    with pytest.raises(ConfigError) as caught:
        plan_of(*overrides)
    return {problem.where: problem for problem in caught.value.problems}


def test_micro_batches_are_searched_for_the_longest_sample_of_training():
    same, longer = (compose([f"rollout.evaluation.sampling.max_new_tokens={tokens}"]).config for tokens in (16, 64))
    shapes = plan_of().model.shapes
    found = [*iter_parallel(longer, shapes, 2, 2)]
    assert found == [*iter_parallel(same, shapes, 2, 2)]
    assert min(layout.max_tokens_per_micro_batch * layout.context_parallel_size for layout in found) == 32


@pytest.mark.parametrize(
    ("overrides", "where", "fix"),
    [
        ([f"{VPP}=2"], VPP, "raise PP"),
        (["parallel=vpp2", f"{VPP}=3"], VPP, "use 2, 1"),
        (["parallel.optimizer_cpu_offload=true"], "parallel.optimizer_cpu_offload", "topology.device=cuda"),
        (["parallel.recompute_method=block"], "parallel.recompute_method", "recompute_granularity=full, or null"),
        ([SELECTIVE, "parallel.recompute_num_layers=1"], "parallel.recompute_num_layers", "granularity=full"),
        (["parallel.recompute_modules=[mlp]"], "parallel.recompute_modules", "granularity=selective, or []"),
        ([*FULL, "parallel.recompute_modules=[mlp]"], "parallel.recompute_modules", "granularity=selective"),
        ([*FULL, "parallel.recompute_method=null"], "parallel.recompute_method", "uniform or block"),
        ([*FULL, "parallel.recompute_num_layers=null"], "parallel.recompute_num_layers", "use 1"),
        ([SELECTIVE, "parallel.recompute_modules=[mpl]"], "parallel.recompute_modules", "did you mean 'mlp'"),
        ([SELECTIVE, "parallel.recompute_modules=[layernorm]"], "parallel.recompute_modules", "remove it"),
        (["parallel=cp2", "parallel.max_tokens_per_micro_batch=16"], "parallel.max_tokens_per_micro_batch", "18"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(overrides, where, fix):
    found = problems_of(*(["data.max_prompt_tokens=17"] if fix == "18" else []), *overrides)
    assert set(found) == {where}
    assert fix in found[where].fix


def test_offloading_is_of_a_bfloat16_model():
    found = problems_of("parallel.optimizer_cpu_offload=true", "topology.device=cuda", "model.dtype=float32")
    assert "model.dtype=bfloat16" in found["parallel.optimizer_cpu_offload"].fix


def test_context_parallelism_lets_longer_samples_in():
    assert "parallel.max_tokens_per_micro_batch" in problems_of("parallel.max_tokens_per_micro_batch=16")
    plan = plan_of("parallel=cp2", "parallel.max_tokens_per_micro_batch=16")
    assert plan.trainer.max_micro_batch_tokens == 32 == plan.batch.max_sample_tokens


def test_weights_leave_from_one_replica_of_each_stage():
    plan = plan_of(*(f"parallel.{name}_parallel_size=2" for name in ("data", "pipeline_model", "context")))
    assert plan.trainer.num_ranks == 8
    assert plan.trainer.weight_sources == ((0,), (4,))


@pytest.mark.parametrize(
    ("layout", "sample", "micro_batch"),
    [((1, 1, False), 1, 1), ((4, 1, True), 1, 4), ((4, 2, False), 4, 4), ((4, 2, True), 4, 8), ((3, 2, True), 4, 12)],
)
def test_what_is_split_is_padded_to_equal_parts(layout, sample, micro_batch):
    tp, cp, is_sequence_parallel = layout
    assert compute_sample_multiple(cp) == sample
    assert compute_micro_batch_multiple(tp, cp, is_sequence_parallel) == micro_batch


def test_the_grid_counts_what_splitting_pads():
    lengths = [1, 3, 5, 8, 2, 7]
    samples = [
        Sample(token_ids=(1,) * length, loss_mask=(False,) * length, rollout_logprobs=None, prompt_index=n, sibling=0)
        for n, length in enumerate(lengths)
    ]
    (row,) = build_grid(samples, num_ranks=1, max_tokens=16, sample_multiple=4, pad_to_multiple=8)
    for micro_batch in row:
        padded = [-(-int(length) // 4) * 4 for length in np.diff(micro_batch.cu_seqlens)]
        assert sum(padded) <= 16 and sum(padded) % 8 == 0
    assert sorted(index for micro_batch in row for index in micro_batch.sample_indices) == [*range(6)]
    assert len(row) == 3  # 4 + 4 + 8 + 8 + 4 + 8 tokens, of which two fill no micro-batch
