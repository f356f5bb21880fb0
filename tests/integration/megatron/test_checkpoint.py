"""Checkpoints: the same layout continues bit for bit, another one to rounding; a failure loses nothing."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rank_group import (
    CP2,
    DP2,
    PP2,
    PP2_VPP2,
    SINGLE,
    TP2,
    Layout,
    RankGroup,
    build_model_node,
    build_trainer_node,
    slow,
    write_hf_model,
)
from test_training import GRPO, SAMPLES, build_rank

from rlrecipes.errors import CheckpointError
from rlrecipes.plan.nodes import ModelNode, TrainerNode

RESUMES = [
    *((layout, layout) for layout in (SINGLE, PP2_VPP2)),
    *((SINGLE, layout) for layout in (TP2, CP2)),
    *((layout, SINGLE) for layout in (DP2, PP2_VPP2)),
    *(slow(layout, layout) for layout in (TP2, PP2, DP2, CP2)),
    *(slow(SINGLE, layout) for layout in (PP2, DP2, PP2_VPP2)),
    *(slow(layout, SINGLE) for layout in (TP2, PP2, CP2)),
]


def train(trainer_rank: Any, rank: int, layout: Layout, num_steps: int) -> list[dict[str, float]]:
    row = layout.build_rows(SAMPLES)[layout.row_of(rank)]
    return [trainer_rank.train_step(row, GRPO) for _ in range(num_steps)]


def save_and_go_on(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path
) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    train(trainer_rank, rank, layout, 2)
    trainer_rank.save_checkpoint(saved)
    row = layout.build_rows(SAMPLES)[layout.row_of(rank)]
    reference = trainer_rank.compute_logprobs(row, which="reference")
    steps = train(trainer_rank, rank, layout, 3)
    trainer_rank.close()
    return steps, reference


def load_and_go_on(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path
) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path if rank else None)  # loading HF first changes nothing
    trainer_rank.load_checkpoint(saved)
    row = layout.build_rows(SAMPLES)[layout.row_of(rank)]
    reference = trainer_rank.compute_logprobs(row, which="reference")
    steps = train(trainer_rank, rank, layout, 3)
    trainer_rank.close()
    return steps, reference


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of the run, and another of the same shapes that a resumed rank starts from."""
    node = build_model_node("qwen3", is_tied=True)
    first, other = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("other")
    write_hf_model(node, first)
    hf = write_hf_model(node, other)
    for parameter in hf.parameters():
        parameter.data.mul_(0.5)
    hf.save_pretrained(other)
    return node, first, other


@pytest.fixture(scope="module")
def saved(models: Any, ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Layout -> (checkpoint directory, the three steps after it, reference logprobs)."""

    @cache
    def save(layout: Layout) -> Any:
        node, path, _ = models
        directory = tmp_path_factory.mktemp("saved") / "step"
        trainer = build_trainer_node(layout, needs_reference=True)
        found = ranks.run(layout.num_ranks, save_and_go_on, layout, trainer, node, path, directory)
        return directory, *found[-1 if layout.pp > 1 else 0]

    return save


@pytest.mark.parametrize(("saved_layout", "layout"), RESUMES, ids=str)
def test_a_checkpoint_continues(
    saved_layout: Layout, layout: Layout, saved: Any, models: Any, ranks: RankGroup
) -> None:
    directory, steps, reference = saved(saved_layout)
    node, _, other = models
    trainer = build_trainer_node(layout, needs_reference=True)
    found = ranks.run(layout.num_ranks, load_and_go_on, layout, trainer, node, other, directory)
    continued, continued_reference = found[-1 if layout.pp > 1 else 0]
    if layout == saved_layout:
        assert continued == steps
        for before, after in zip(reference, continued_reference, strict=True):
            assert (before == after).all()
    for step, expected in zip(continued, steps, strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)


def resume_with_another_rate(
    rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path
) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    trainer_rank.load_checkpoint(saved)
    done = trainer_rank.num_train_steps
    return done, train(trainer_rank, rank, SINGLE, 1)[0]["lr"]


def test_a_resume_takes_the_running_recipes_learning_rate(models: Any, ranks: RankGroup, tmp_path: Path) -> None:
    node, path, _ = models
    trainer = build_trainer_node(SINGLE)
    ranks.run(1, save_and_forget, trainer, node, path, tmp_path / "saved")
    changed = trainer.model_copy(
        update={"optim": trainer.optim.model_copy(update={"lr": 5e-4, "lr_decay_style": "constant"})}
    )
    assert ranks.run(1, resume_with_another_rate, changed, node, path, tmp_path / "saved") == [(2, 5e-4)]


def save_and_forget(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path) -> None:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    train(trainer_rank, rank, SINGLE, 2)
    trainer_rank.save_checkpoint(saved)


@contextmanager
def full_disk() -> Iterator[None]:
    """Writing further than 8 kB into any file fails; what this process prints, which may be to one, goes nowhere."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sys.stdout.flush()
    sys.stderr.flush()
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


def meet_full_disk(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    told = []
    with full_disk():
        print("a library may print", flush=True)
        for directory in (saved / "full", Path("/proc/nowhere")):
            with pytest.raises(CheckpointError) as caught:
                trainer_rank.save_checkpoint(directory)
            told.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        trainer_rank.load_checkpoint(saved / "missing")
    told.append(str(caught.value))
    trainer_rank.save_checkpoint(saved / "good")
    steps = train(trainer_rank, rank, TP2, 1)
    trainer_rank.close()
    return told, steps


def test_a_failed_save_is_told_on_every_rank_and_the_run_may_go_on(
    models: Any, ranks: RankGroup, tmp_path: Path
) -> None:
    node, path, _ = models
    for told, steps in ranks.run(2, meet_full_disk, build_trainer_node(TP2), node, path, tmp_path):
        assert ["full" in told[0], "nowhere" in told[1], "missing" in told[2]] == [True, True, True]
        assert steps[0]["loss"] == pytest.approx(steps[0]["loss"])
    assert (tmp_path / "good" / "metadata.json").is_file()


def load_without_reference(rank: int, port: int, trainer: TrainerNode, node: ModelNode, saved: Path) -> str:
    trainer_rank = build_rank(rank, port, trainer, node, None)
    with pytest.raises(CheckpointError) as caught:
        trainer_rank.load_checkpoint(saved)
    return str(caught.value)


def test_a_checkpoint_without_the_reference_a_recipe_needs_is_refused(
    models: Any, ranks: RankGroup, tmp_path: Path
) -> None:
    node, path, _ = models
    ranks.run(1, save_and_forget, build_trainer_node(SINGLE), node, path, tmp_path / "saved")
    trainer = build_trainer_node(TP2, needs_reference=True)
    for told in ranks.run(2, load_without_reference, trainer, node, tmp_path / "saved"):
        assert "holds no reference" in told


def fail_on_one_rank(rank: int, port: int, trainer: TrainerNode, node: ModelNode) -> str:
    from rlrecipes.engines.megatron.agreement import run_together

    build_rank(rank, port, trainer, node, None)

    def act() -> None:
        if rank == 1:
            raise OSError("no space left")

    with pytest.raises(CheckpointError) as caught:
        run_together("somewhere", "free space", act)
    return str(caught.value)


def test_a_failure_on_one_rank_is_raised_on_all(ranks: RankGroup) -> None:
    for told in ranks.run(2, fail_on_one_rank, build_trainer_node(TP2), build_model_node()):
        assert told == "somewhere: rank 1: OSError: no space left\n    fix: free space"
