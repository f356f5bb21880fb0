"""What Megatron is built with, and what its absence of CUDA is hidden by, in a process of its own."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_group import SINGLE, RankGroup, build_model_node, build_trainer_node, write_hf_model
from test_training import GRPO, SAMPLES, build_rank

from rlrecipes.errors import ConfigError
from rlrecipes.plan.nodes import ModelNode, TrainerNode

ASK = """
import torch
answers = {
    "device": lambda: torch.cuda.current_device(),
    "factory": lambda: torch.zeros(2, device="cuda").device,
    "cuda": lambda: torch.zeros(2).cuda().device,
    "type": lambda: torch.zeros(2).type(),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
}
"""


def ask(module_name: str) -> dict[str, str]:
    module = types.ModuleType(module_name)
    exec(ASK, module.__dict__)
    told = {}
    for name, answer in module.answers.items():
        try:
            told[name] = str(answer())
        except (RuntimeError, AssertionError):
            told[name] = "refused"
    return told


def compare_callers(rank: int, port: int) -> Any:
    from rlrecipes.engines.megatron import cpu

    before = ask("elsewhere")
    cpu.run_patches()
    return before, ask("elsewhere"), ask("megatron.core.anything")


def test_only_megatron_sees_the_patches(ranks: RankGroup) -> None:
    before, elsewhere, megatron = ranks.run(1, compare_callers)[0]
    assert elsewhere == before
    assert elsewhere["factory"] == "refused"
    assert megatron == {
        "device": "cpu",
        "factory": "cpu",
        "cuda": "cpu",
        "type": "torch.cuda.FloatTensor",
        "stream": "None",
    }


def build_configs(rank: int, port: int, trainers: list[TrainerNode], node: ModelNode) -> list[Any]:
    from rlrecipes.engines.megatron import cpu
    from rlrecipes.engines.megatron.configuration import (
        build_ddp_config,
        build_optimizer_config,
        build_transformer_config,
    )
    from rlrecipes.plan.parameters import compute_padded_vocab_size

    cpu.run_patches()
    told: list[Any] = [compute_padded_vocab_size(97, tp) for tp in (1, 2, 8)] + [compute_padded_vocab_size(129, 3)]
    for trainer in trainers:
        try:
            config = build_transformer_config(node, trainer)
            optimizer = build_optimizer_config(trainer, trainer.optim, config.params_dtype)
            told.append((config.init_method_std, optimizer.decoupled_lr, build_ddp_config(trainer).bucket_size))
        except ConfigError as error:
            told.append([(problem.where, problem.problem, problem.fix) for problem in error.problems])
    return told


def test_native_options_are_judged_and_go_to_the_class_that_has_them(ranks: RankGroup) -> None:
    natives: list[dict[str, Any]] = [
        {"init_method_std": 0.5, "decoupled_lr": 0.25, "bucket_size": 7},
        {"hidden_dropot": 0.1, "num_layers": 3},
        {"cpu_offloading": True, "cpu_offloading_num_layers": 99},
    ]
    trainers = [build_trainer_node(SINGLE, megatron=native) for native in natives]
    trainers.append(build_trainer_node(SINGLE, optimizer_cpu_offload=True))
    found = ranks.run(1, build_configs, trainers, build_model_node())[0]
    assert found[:4] == [128, 128, 128, 384]
    assert found[4] == (0.5, 0.25, 7)
    (misspelt, taken), (refused,), (homeless,) = found[5:]
    assert misspelt[0] == "parallel.megatron.hidden_dropot"
    assert "hidden_dropout" in misspelt[2]
    assert taken[0] == "parallel.megatron.num_layers" and taken[2] == "set model.shapes.num_layers"
    assert refused[0] == "parallel"
    assert homeless[:2] == ("parallel.optimizer_cpu_offload", "needs Transformer Engine, which is not installed")


def train_in_bfloat16(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = SINGLE.build_rows(SAMPLES)[0]
    before = {name: tensor.clone() for name, tensor in trainer_rank.iter_hf_tensors()}
    steps = [trainer_rank.train_step(row, GRPO) for _ in range(2)]
    return before, steps, dict(trainer_rank.iter_hf_tensors())


def test_bfloat16_stays_near_float32(ranks: RankGroup, tmp_path: Path) -> None:
    node = build_model_node("qwen3", dtype="bfloat16")
    write_hf_model(build_model_node("qwen3"), tmp_path)
    trainer = build_trainer_node(SINGLE)
    before, steps, after = ranks.run(1, train_in_bfloat16, trainer, node, tmp_path)[0]
    exact = ranks.run(1, train_in_bfloat16, trainer, build_model_node("qwen3"), tmp_path)[0][1]
    assert steps[0]["entropy"] == pytest.approx(exact[0]["entropy"], rel=1e-2)
    assert steps[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=5e-2)
    for name, tensor in after.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.dim() == 1 or not torch.equal(tensor, before[name])
        torch.testing.assert_close(tensor, before[name], atol=1e-2, rtol=2e-2)
