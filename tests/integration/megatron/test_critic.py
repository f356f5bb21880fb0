"""The critic: the numbers of a plain transformers model with a linear head, at every layout, beside the policy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_group import (
    CP2,
    CP2_TP2_SP,
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
    slow,
    write_hf_model,
)
from test_training import GRPO, build_rank, explode_gradient

from rlrecipes.algos.value_loss import compute_value_objective
from rlrecipes.batching.grid import unpack_tokens
from rlrecipes.config.schema import OptimConfig
from rlrecipes.errors import CheckpointError, TrainerError
from rlrecipes.plan.nodes import CriticNode, ModelNode, TrainerNode
from rlrecipes.types import MicroBatch, Sample

OPTIM = OptimConfig(
    lr=0.3,
    min_lr=0.1,
    lr_decay_style="linear",
    num_warmup_train_steps=1,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_eps=1.0,  # a step is then nearly proportional to the gradient, so weights tell whether it was right
    weight_decay=0.1,
    clip_grad=0.5,
)
CRITIC = CriticNode(path=None, optim=OPTIM, num_train_steps_total=8)
OBJECTIVE = partial(compute_value_objective, value_clip=0.05)
LAYOUTS = [SINGLE, slow(TP2), TP2_SP, slow(PP2), DP2, slow(CP2), PP2_VPP2, slow(CP2_TP2_SP)]
HEAD = "head"


def build_critic_samples() -> list[Sample]:
    rng = np.random.default_rng(1)
    return [
        replace(
            sample,
            old_values=(0.1 * rng.standard_normal(len(sample.token_ids))).astype(np.float32),
            returns=rng.standard_normal(len(sample.token_ids)).astype(np.float32),
        )
        for sample in build_samples(14)
    ]


SAMPLES = build_critic_samples()


def build_critic_trainer(layout: Layout, **changes: Any) -> TrainerNode:
    return build_trainer_node(layout, critic=changes.pop("critic", CRITIC), **changes)


def own_row(rank: int, layout: Layout) -> list[MicroBatch]:
    return layout.build_rows(SAMPLES)[layout.row_of(rank)]


def read_critic(trainer_rank: Any) -> dict[str, torch.Tensor]:
    """Weights of the critic that this rank can tell: of its stage, by HF names, and the head."""
    critic = trainer_rank._critic
    found = {name: tensor.clone() for name, tensor in critic.weights.iter_hf_tensors()}
    last = critic.chunks[-1]
    return found | ({HEAD: last.output_layer.weight.detach().clone()} if last.post_process else {})


def read_policy(trainer_rank: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer_rank.iter_hf_tensors()}


def train_both(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    """Three steps of the critic, then two of the policy."""
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = own_row(rank, layout)
    found = {"values": [trainer_rank.compute_values(row)], "weights": [read_critic(trainer_rank)], "steps": []}
    found["policy"] = [read_policy(trainer_rank)]
    for _ in range(3):
        found["steps"].append(trainer_rank.critic_step(row, OBJECTIVE))
        found["values"].append(trainer_rank.compute_values(row))
        found["weights"].append(read_critic(trainer_rank))
    found["policy"].append(read_policy(trainer_rank))
    found["policy_steps"] = [trainer_rank.train_step(row, GRPO) for _ in range(2)]
    found["policy"].append(read_policy(trainer_rank))
    found["values"].append(trainer_rank.compute_values(row))
    found["weights"].append(read_critic(trainer_rank))
    trainer_rank.close()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelNode, Path]:
    node, path = build_model_node("qwen3", is_tied=True), tmp_path_factory.mktemp("hf")
    write_hf_model(node, path)
    return node, path


@pytest.fixture(scope="module")
def trained(model: Any, ranks: RankGroup) -> Any:
    """Layout -> what each of its ranks found."""
    return cache(lambda layout: ranks.run(layout.num_ranks, train_both, layout, build_critic_trainer(layout), *model))


class PlainCritic:
    """Transformers' layers, a linear head, torch's AdamW: what the critic is to be."""

    def __init__(self, path: Path, head: torch.Tensor) -> None:
        from transformers import AutoModel

        self.backbone = AutoModel.from_pretrained(path, attn_implementation="eager").float()
        self.head = torch.nn.Linear(head.shape[1], 1, bias=False)
        self.head.weight.data.copy_(head)
        self.parameters = [*self.backbone.parameters(), self.head.weight]
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": OPTIM.weight_decay},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = OPTIM.adam_beta1, OPTIM.adam_beta2
        self.optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=betas, eps=OPTIM.adam_eps)

    def compute_values(self, sample: Sample) -> torch.Tensor:
        """[L]: entry t is the value of the state before token t, 0 where nothing is trained."""
        hidden = self.backbone(torch.tensor([sample.token_ids])).last_hidden_state[0, :-1]
        values = torch.cat([torch.zeros(1), self.head(hidden)[:, 0]])
        return torch.where(torch.tensor(sample.loss_mask), values, 0.0)

    def weights(self) -> dict[str, torch.Tensor]:
        named = {f"model.{name}": p.detach().clone() for name, p in self.backbone.named_parameters()}
        return named | {HEAD: self.head.weight.detach().clone()}

    def train_step(self, lr: float) -> dict[str, float]:
        loss = torch.zeros(())
        for sample in SAMPLES:
            old, targets, values = (
                torch.tensor(sample.old_values),
                torch.tensor(sample.returns),
                self.compute_values(sample),
            )
            clipped = old + (values - old).clamp(-0.05, 0.05)
            error = torch.maximum((values - targets) ** 2, (clipped - targets) ** 2)
            loss = loss + (error * torch.tensor(sample.loss_weights))[torch.tensor(sample.loss_mask)].sum()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, OPTIM.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return {"loss": float(loss.detach()), "grad_norm": float(norm)}


@pytest.fixture(scope="module")
def plain(model: Any, trained: Any) -> Any:
    """(values of each sample before and after each of three steps, metrics, weights), from the head the critic drew."""
    critic = PlainCritic(model[1], trained(SINGLE)[0]["weights"][0][HEAD])
    values, steps, weights = [], [], [critic.weights()]
    for lr in (0.15, 0.3, 0.3 - 0.2 / 7, None):
        with torch.no_grad():
            values.append([critic.compute_values(sample).numpy() for sample in SAMPLES])
        if lr is not None:
            steps.append(critic.train_step(lr) | {"lr": lr})
            weights.append(critic.weights())
    return values, steps, weights


def values_of(found: list[Any], layout: Layout, index: int) -> list[np.ndarray]:
    """By sample; entry t speaks of token t."""
    answers = [part["values"][index] for part in found if part["values"][index]]
    assert len(answers) == layout.dp
    return unpack_tokens(layout.build_rows(SAMPLES), answers, len(SAMPLES))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_losses_and_gradients_are_those_of_a_plain_model(layout: Layout, trained: Any, plain: Any) -> None:
    found = trained(layout)
    values, steps, weights = plain
    for index, expected_values in enumerate(values):
        for value, expected in zip(values_of(found, layout, index), expected_values, strict=True):
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, expected, atol=1e-5, rtol=1e-5)
    assert all(part["steps"] == found[0]["steps"] for part in found)
    for step, expected in zip(found[0]["steps"], steps, strict=True):
        assert {name: step[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert step["num_tokens"] == sum(sum(sample.loss_mask) for sample in SAMPLES)
        assert 0 < step["value_clip_fraction"] < 1
    for index, expected_weights in enumerate(weights):
        own = {name: tensor for part in found for name, tensor in part["weights"][index].items()}
        assert own.keys() == expected_weights.keys()
        for name, tensor in expected_weights.items():
            torch.testing.assert_close(own[name], tensor, atol=1e-5, rtol=1e-5)
    assert float((weights[3][HEAD] - weights[0][HEAD]).abs().max()) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_holds_the_same_head(layout: Layout, trained: Any) -> None:
    found = trained(layout)
    heads = [[weights[HEAD] for weights in part["weights"]] for part in found if HEAD in part["weights"][0]]
    assert len(heads) == layout.tp * layout.cp * layout.dp
    assert all(torch.equal(head, first) for own in heads for head, first in zip(own, heads[0], strict=True))
    assert torch.equal(heads[0][0], trained(SINGLE)[0]["weights"][0][HEAD])
    assert float(heads[0][0].std()) * math.sqrt(48) == pytest.approx(0.1, rel=0.3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_critic_and_policy_leave_each_other_alone(layout: Layout, trained: Any, model: Any, ranks: RankGroup) -> None:
    alone = ranks.run(layout.num_ranks, train_policy, layout, build_trainer_node(layout), *model)
    for part, policy_steps in zip(trained(layout), alone, strict=True):
        before, after_critic, after_policy = part["policy"]
        assert all(torch.equal(before[name], tensor) for name, tensor in after_critic.items())
        assert not all(torch.equal(before[name], tensor) for name, tensor in after_policy.items())
        assert part["policy_steps"] == policy_steps
        assert all(torch.equal(part["weights"][3][name], tensor) for name, tensor in part["weights"][4].items())
        for value, later in zip(part["values"][3], part["values"][4], strict=True):
            np.testing.assert_array_equal(value, later)


def train_policy(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    with pytest.raises(TrainerError, match="no critic"):
        trainer_rank.compute_values(own_row(rank, layout))
    with pytest.raises(TrainerError, match="no critic"):
        trainer_rank.critic_step(own_row(rank, layout), OBJECTIVE)
    steps = [trainer_rank.train_step(own_row(rank, layout), GRPO) for _ in range(2)]
    trainer_rank.close()
    return steps


def test_a_deterministic_rank_repeats_itself_bit_for_bit(model: Any, ranks: RankGroup) -> None:
    trainer = build_critic_trainer(TP2_SP, is_deterministic=True)
    first, second = (ranks.run(2, train_both, TP2_SP, trainer, *model)[0] for _ in range(2))
    assert first["steps"] == second["steps"]
    assert all(torch.equal(tensor, second["weights"][3][name]) for name, tensor in first["weights"][3].items())
    for value, again in zip(first["values"][3], second["values"][3], strict=True):
        np.testing.assert_array_equal(value, again)


def start(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    found = read_critic(trainer_rank)
    trainer_rank.close()
    return found


def test_layers_come_from_their_own_path_and_the_head_from_the_seed(
    model: Any, ranks: RankGroup, tmp_path: Path
) -> None:
    node, path = model
    hf = write_hf_model(node, tmp_path)
    for parameter in hf.parameters():
        parameter.data.mul_(0.5)
    hf.save_pretrained(tmp_path)
    own = CRITIC.model_copy(update={"path": str(tmp_path)})
    trainers = [build_critic_trainer(SINGLE, critic=own), build_critic_trainer(SINGLE, seed=4)]
    elsewhere, reseeded = (ranks.run(1, start, trainer, node, path)[0] for trainer in trainers)
    assert torch.equal(elsewhere["model.norm.weight"], hf.model.norm.weight)
    assert torch.equal(2 * elsewhere["model.norm.weight"], reseeded["model.norm.weight"])
    assert not torch.equal(elsewhere[HEAD], reseeded[HEAD])


def poison_masked(micro_batch: MicroBatch) -> MicroBatch:
    mask = micro_batch.loss_mask
    return replace(
        micro_batch,
        old_values=np.where(mask, micro_batch.old_values, np.float32(np.nan)),
        returns=np.where(mask, micro_batch.returns, np.float32(1e9)),
        loss_weights=np.where(mask, micro_batch.loss_weights, np.float32(np.nan)),
    )


def poison_one_token(batch: Any, values: torch.Tensor) -> Any:
    """NaN in the one micro-batch that holds sample 5."""
    is_there = bool((batch["token_ids"] == SAMPLES[5].token_ids[0]).any())
    return (values * math.nan if is_there else values**2), {}


def explode(batch: Any, values: torch.Tensor) -> Any:
    return explode_gradient(batch, values, None)


def meet_poison(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = own_row(rank, layout)
    before = read_critic(trainer_rank)
    told = []
    for objective in (poison_one_token, explode):
        with pytest.raises(TrainerError) as caught:
            trainer_rank.critic_step(row, objective)
        told.append((caught.value.problems[0].where, "algo.critic.optim.lr" in caught.value.problems[0].fix))
    after = read_critic(trainer_rank)
    step = trainer_rank.critic_step([poison_masked(micro_batch) for micro_batch in row], OBJECTIVE)
    trainer_rank.close()
    return told, all(torch.equal(before[name], after[name]) for name in before), step


@pytest.mark.parametrize("layout", [TP2_SP, PP2, DP2], ids=str)
def test_what_is_not_finite_stops_every_rank_unless_it_is_masked(
    layout: Layout, trained: Any, model: Any, ranks: RankGroup
) -> None:
    for told, is_untouched, step in ranks.run(
        layout.num_ranks, meet_poison, layout, build_critic_trainer(layout), *model
    ):
        assert told == [("trainer.critic_step.loss", True), ("trainer.critic_step.grad_norm", True)]
        assert is_untouched
        assert step == trained(layout)[0]["steps"][0]


# ---- checkpoint


def go_on(trainer_rank: Any, row: list[MicroBatch]) -> list[Any]:
    """Two steps of both, as one after a load says little about the optimizer."""
    steps = [(trainer_rank.critic_step(row, OBJECTIVE), trainer_rank.train_step(row, GRPO)) for _ in range(2)]
    return [steps, trainer_rank.compute_values(row)]


def save_and_go_on(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path
) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = own_row(rank, layout)
    for _ in range(2):
        trainer_rank.critic_step(row, OBJECTIVE)
    trainer_rank.train_step(row, GRPO)
    trainer_rank.save_checkpoint(saved)
    found = go_on(trainer_rank, row)
    trainer_rank.close()
    return found


def load_and_go_on(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, saved: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, None)
    trainer_rank.load_checkpoint(saved)
    found = go_on(trainer_rank, own_row(rank, layout))
    trainer_rank.close()
    return found


@pytest.fixture(scope="module")
def saved(model: Any, ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(Layout, precision) -> (checkpoint, what each rank found after it)."""

    @cache
    def save(layout: Layout, dtype: str = "float32") -> Any:
        node, path = model[0].model_copy(update={"dtype": dtype}), model[1]
        directory = tmp_path_factory.mktemp("saved") / "step"
        trainer = build_critic_trainer(layout)
        return directory, ranks.run(layout.num_ranks, save_and_go_on, layout, trainer, node, path, directory)

    return save


def collect(found: list[Any], layout: Layout) -> tuple[Any, list[np.ndarray]]:
    answers = [values for _, values in found if values]
    return found[0][0], unpack_tokens(layout.build_rows(SAMPLES), answers, len(SAMPLES))


RESUMES = [
    (SINGLE, SINGLE, "float32"),
    (TP2_SP, SINGLE, "float32"),
    *((SINGLE, layout, "float32") for layout in (DP2, PP2_VPP2)),
    (TP2_SP, TP2_SP, "bfloat16"),  # but the head: two precisions in one optimizer
    *(slow(layout, layout, "float32") for layout in (TP2_SP, PP2, DP2)),
    *(slow(SINGLE, layout, "float32") for layout in (TP2_SP, PP2, CP2)),
    *(slow(layout, SINGLE, "float32") for layout in (PP2, DP2, CP2, PP2_VPP2)),
    *(slow(layout, layout, "bfloat16") for layout in (PP2, DP2)),
]


@pytest.mark.parametrize(("saved_layout", "layout", "dtype"), RESUMES, ids=str)
def test_a_checkpoint_continues(
    saved_layout: Layout, layout: Layout, dtype: str, saved: Any, model: Any, ranks: RankGroup
) -> None:
    directory, found = saved(saved_layout, dtype)
    steps, values = collect(found, saved_layout)
    node = model[0].model_copy(update={"dtype": dtype})
    trainer = build_critic_trainer(layout)
    again = ranks.run(layout.num_ranks, load_and_go_on, layout, trainer, node, directory)
    continued, continued_values = collect(again, layout)
    if layout == saved_layout:
        assert continued == steps
    for pair, expected_pair in zip(continued, steps, strict=True):
        for step, expected in zip(pair, expected_pair, strict=True):
            assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for value, expected in zip(continued_values, values, strict=True):
        np.testing.assert_allclose(value, expected, atol=0 if layout == saved_layout else 1e-5)
    assert [critic["lr"] for critic, _ in steps] == pytest.approx([0.3 - 0.2 / 7, 0.3 - 0.4 / 7])


def save_without_critic(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path) -> None:
    build_rank(rank, port, trainer, node, path).save_checkpoint(saved)


def load_and_be_told(rank: int, port: int, trainer: TrainerNode, node: ModelNode, saved: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        build_rank(rank, port, trainer, node, None).load_checkpoint(saved)
    return str(caught.value)


def test_a_critic_on_one_side_alone_is_refused(saved: Any, model: Any, ranks: RankGroup, tmp_path: Path) -> None:
    node, path = model
    without, with_critic = build_trainer_node(TP2), build_critic_trainer(TP2)
    ranks.run(2, save_without_critic, without, node, path, tmp_path / "without")
    for told in ranks.run(2, load_and_be_told, with_critic, node, tmp_path / "without"):
        assert "holds no critic" in told and "algo.critic" in told
    for told in ranks.run(2, load_and_be_told, without, node, saved(SINGLE)[0]):
        assert "holds a critic" in told and "algo.critic" in told


def test_all_of_the_critic_is_under_its_prefix(saved: Any) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    keys = FileSystemReader(saved(SINGLE)[0]).read_metadata().state_dict_metadata.keys()
    critics = {key for key in keys if key.startswith("critic.")}
    policys = {key for key in keys - critics if "_extra_state" not in key and not key.startswith("common_state")}
    assert "critic.output_layer.weight" in critics
    bare = {key.removeprefix("critic.") for key in critics if "output_layer" not in key and "_extra_state" not in key}
    assert bare == policys
