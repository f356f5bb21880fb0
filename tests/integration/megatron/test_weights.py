"""HF weights into Megatron and out again, at every layout, judged by transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_group import (
    CP2,
    DP2,
    PP2,
    PP2_VPP2,
    SINGLE,
    TP2,
    TP2_SP,
    Layout,
    RankGroup,
    build_model_node,
    build_samples,
    build_trainer_node,
    write_hf_model,
)
from safetensors.torch import load_file

from rlrecipes.errors import DataError
from rlrecipes.plan.nodes import ModelNode, TrainerNode

MODELS = [(family, is_tied) for family in ("qwen3", "qwen2", "llama") for is_tied in (True, False)]
SAMPLES = build_samples(12)


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{'tied' if model[1] else 'untied'}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    node = build_model_node(request.param[0], is_tied=request.param[1])
    path = tmp_path_factory.mktemp("hf")
    hf = write_hf_model(node, path)
    with torch.no_grad():
        logits = [hf(torch.tensor([sample.token_ids])).logits[0].numpy() for sample in SAMPLES]
    return node, path, logits


def compute_logits_and_export(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path, exported: Path
) -> Any:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from rlrecipes.engines.megatron import forward
    from rlrecipes.engines.megatron.rank import TrainerRank

    trainer_rank = TrainerRank(trainer, node, rank=rank, master_address="127.0.0.1", master_port=port)
    trainer_rank.load_hf(path)

    def read(inputs: forward.Inputs, out: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(out) for _ in range(group.size())]
        dist.all_gather(parts, out.contiguous(), group=group)
        return inputs.spread(torch.cat(parts, 1))

    def step(micro_batches: Any, model: Any) -> Any:
        inputs, out = forward._run_model(micro_batches, model)
        return out, partial(read, inputs)

    grid = [replace(batch, loss_mask=np.ones_like(batch.loss_mask)) for batch in layout.build_rows(SAMPLES)[0]]
    with torch.no_grad():
        found = trainer_rank._policy.run_schedule(step, grid, forward_only=True, collect_non_loss_data=True)
    trainer_rank.export_hf(exported, path)
    trainer_rank.close()
    return [(micro_batch, logits.numpy()) for micro_batch, logits in zip(grid, found, strict=False)]


@pytest.mark.parametrize("layout", [SINGLE, TP2, TP2_SP, PP2, PP2_VPP2, CP2], ids=str)
def test_logits_equal_transformers_and_export_is_bit_equal(
    model: Any, layout: Layout, ranks: RankGroup, tmp_path: Path
) -> None:
    node, path, expected = model
    trainer = build_trainer_node(layout)
    arguments = layout, trainer, node, path, tmp_path / "out"
    found = ranks.run(layout.num_ranks, compute_logits_and_export, *arguments)[-1]
    assert found
    for micro_batch, logits in found:
        for index, start, end in zip(
            micro_batch.sample_indices, micro_batch.cu_seqlens, micro_batch.cu_seqlens[1:], strict=False
        ):
            np.testing.assert_allclose(logits[start:end, :97], expected[index], atol=1e-5, rtol=1e-5)
    before = load_file(path / "model.safetensors")
    after = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]


def export_twice(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path, exported: Path) -> Any:
    from rlrecipes.engines.megatron.rank import TrainerRank
    from rlrecipes.errors import CheckpointError

    trainer_rank = TrainerRank(trainer, node, rank=rank, master_address="127.0.0.1", master_port=port)
    trainer_rank.load_hf(path)
    trainer_rank.export_hf(exported, path)
    trainer_rank.export_hf(exported, path)
    with pytest.raises(CheckpointError, match="nothing earlier was lost"):
        trainer_rank.export_hf("/proc/nowhere/hf", path)
    sources = trainer_rank.is_weight_source
    trainer_rank.close()
    return sources


@pytest.mark.parametrize(
    ("layout", "sources"),
    [
        (TP2, [True, False]),
        (PP2, [True, True]),
        (DP2, [True, False]),
        (CP2, [True, False]),
        (PP2_VPP2, [True, True]),
    ],
)
def test_an_export_loads_in_transformers_and_replaces_the_one_before(
    layout: Layout, sources: list[bool], ranks: RankGroup, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    node = build_model_node("qwen3", is_tied=True)
    hf = write_hf_model(node, tmp_path / "hf")
    found = ranks.run(2, export_twice, build_trainer_node(layout), node, tmp_path / "hf", tmp_path / "out")
    trainer = build_trainer_node(layout)
    assert found == sources == [any(rank in stage[:1] for stage in trainer.weight_sources) for rank in range(2)]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, q) for p, q in zip(hf.parameters(), again.parameters(), strict=True))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "out"]


def load_wrong_models(rank: int, port: int, trainer: TrainerNode, node: ModelNode, wrong: list[Path]) -> list[str]:
    from rlrecipes.engines.megatron.rank import TrainerRank

    trainer_rank = TrainerRank(trainer, node, rank=rank, master_address="127.0.0.1", master_port=port)
    told = []
    for path in wrong:
        with pytest.raises(DataError) as caught:
            trainer_rank.load_hf(path)
        told.append(str(caught.value))
    return told


def test_another_model_is_refused(ranks: RankGroup, tmp_path: Path) -> None:
    shapes = build_model_node().shapes
    changes: dict[str, Any] = {
        "vocabulary": {"vocab_size": 98},
        "width": {"hidden_size": 64},
        "ffn": {"ffn_hidden_size": 96},
        "heads": {"num_query_groups": 4},
        "layers": {"num_layers": 3},
    }
    for name, change in changes.items():
        node = build_model_node().model_copy(update={"shapes": shapes.model_copy(update=change)})
        write_hf_model(node, tmp_path / name)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\x10" * 100)
    wrong = [tmp_path / name for name in (*changes, "torn", "missing")]
    told = ranks.run(1, load_wrong_models, build_trainer_node(SINGLE), build_model_node(), wrong)[0]
    parts = ["embed_tokens", "48", "mlp", "k_proj", "layers.3.", "torn", "missing"]
    assert [part in text for part, text in zip(parts, told, strict=True)] == [True] * len(parts), told


def find_copied(rank: int, port: int, trainer: TrainerNode, node: ModelNode) -> set[str]:
    from rlrecipes.engines.megatron.rank import TrainerRank

    trainer_rank = TrainerRank(trainer, node, rank=rank, master_address="127.0.0.1", master_port=port)
    own = {parameter.untyped_storage().data_ptr() for _, parameter in trainer_rank._policy.named_parameters()}
    sent = {name: tensor.untyped_storage().data_ptr() for name, tensor in trainer_rank.iter_hf_tensors()}
    trainer_rank.close()
    return {name.split(".")[-2] for name, address in sent.items() if address not in own}


def test_what_one_rank_holds_whole_is_not_copied(ranks: RankGroup) -> None:
    copied = ranks.run(1, find_copied, build_trainer_node(SINGLE), build_model_node("qwen3"))[0]
    assert copied == {"q_proj", "k_proj", "v_proj"}  # they lie mixed, group by group
