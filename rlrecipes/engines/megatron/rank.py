"""One trainer rank: one Megatron process. Owns policy, critic and the collectives between ranks.

Every rank of the run calls the same methods in the same order; what each returns says on which ranks it means
something. Nothing here knows Ray: whoever holds a rank calls it like any object.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from rlrecipes.engines.megatron import cpu
from rlrecipes.engines.megatron.checkpoint import run_load_checkpoint, run_save_checkpoint
from rlrecipes.engines.megatron.configuration import build_transformer_config, to_megatron_num_chunks
from rlrecipes.engines.megatron.critic import ValueReader, build_critic
from rlrecipes.engines.megatron.export import run_export_hf
from rlrecipes.engines.megatron.forward import (
    LogprobReader,
    Objective,
    Reader,
    TopkReader,
    build_reading_step,
    build_train_step,
)
from rlrecipes.engines.megatron.model import build_model
from rlrecipes.engines.megatron.trained_model import TrainedModel
from rlrecipes.engines.megatron.weights import WeightMap
from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.types import MicroBatch

_COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait for another rank; after it the collective raises."""


class TrainerRank:
    """One process of the trainer; builds its part of the model, weights still undefined.

    Args:
        trainer: layout, precision, optimizer; the same on every rank.
        model: the trained model; the same on every rank.
        rank: 0 .. number of ranks - 1; TP fastest, then CP, DP and PP.
        master_address: host of rank 0.
        master_port: free port there.

    Raises:
        ConfigError: Megatron refuses the layout.
        TrainerError: the other ranks did not come.
    """

    def __init__(
        self, trainer: TrainerNode, model: ModelNode, *, rank: int, master_address: str, master_port: int
    ) -> None:
        self._trainer, self._model = trainer, model
        self._run_process_setup()
        config = build_transformer_config(model, trainer)
        self._init_process_group(rank, f"tcp://{master_address}:{master_port}")
        self._seed(0)
        chunks = build_model(model, trainer, config)
        group = parallel_state.get_tensor_model_parallel_group()
        self._weights = WeightMap(chunks, model.shapes, group)
        self._policy = TrainedModel(chunks, self._weights, trainer, trainer.optim, trainer.num_train_steps_total)
        self._critic = build_critic(model, trainer, trainer.critic) if trainer.critic else None
        self._reader = LogprobReader(
            trainer.temperature, model.shapes.vocab_size, group, top_p=trainer.top_p, top_k=trainer.top_k
        )
        self._frozen: dict[str, dict[str, Tensor]] = {}
        """Weights beside the policy's, by parameter name: the reference's, the teacher's."""

    # ---- set-up

    def _run_process_setup(self) -> None:
        if self._trainer.device == "cpu":
            cpu.run_patches()
            torch.set_num_threads(self._trainer.num_threads)
        else:
            torch.cuda.set_device(0)  # whoever started this process shows it one GPU
        if self._trainer.is_deterministic:
            torch.use_deterministic_algorithms(True)
            # Filling costs time, and nothing reads such memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def _init_process_group(self, rank: int, init_method: str) -> None:
        try:
            dist.init_process_group(
                "gloo" if self._trainer.device == "cpu" else "nccl",
                init_method=init_method,
                rank=rank,
                world_size=self._trainer.num_ranks,
                timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise TrainerError(
                f"trainer.rank{rank}",
                f"no process group over {init_method}: {error}",
                "see why another rank did not start; its message comes first",
            ) from error
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self._trainer.tensor_model_parallel_size,
            pipeline_model_parallel_size=self._trainer.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=to_megatron_num_chunks(self._trainer),
            context_parallel_size=self._trainer.context_parallel_size,
            expert_model_parallel_size=self._trainer.expert_model_parallel_size,
            expert_tensor_parallel_size=self._trainer.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, int(_COLLECTIVE_TIMEOUT_S // 60)),
        )

    def _seed(self, train_step: int) -> None:
        """Make whatever is random a function of seed and train step, so that a resume has nothing to restore."""
        seed = self._trainer.seed + 1_000_003 * train_step
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    # ---- who this is

    @property
    def is_weight_source(self) -> bool:
        """Whether weights leave from here: rank 0 of TP, CP and DP of each pipeline stage."""
        is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return bool(is_first_replica and parallel_state.get_tensor_model_parallel_rank() == 0)

    @property
    def _is_gathering(self) -> bool:
        return any(dist.get_rank() in ranks for ranks in self._trainer.weight_sources)

    @property
    def _is_last_stage(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage())

    @property
    def num_train_steps(self) -> int:
        """Train steps of the policy since the first start of the run."""
        return self._policy.num_train_steps

    # ---- weights

    def load_hf(self, path: str | Path) -> None:
        """Take the weights of an HF directory, as policy, as reference, and as layers of a critic without a path.

        A teacher's come from its own directory.

        Raises:
            DataError: a tensor is missing or has another shape.
        """
        if self._trainer.teacher_path is not None:
            self._policy.load_hf(Path(self._trainer.teacher_path))
            self._keep("teacher")
        self._policy.load_hf(Path(path))
        if self._critic is not None and self._trainer.critic is not None:
            self._critic.load_hf(Path(self._trainer.critic.path or path))
        if self._trainer.needs_reference:
            self._keep("reference")

    def _keep(self, which: str) -> None:
        self._frozen[which] = {name: p.detach().cpu().clone() for name, p in self._policy.named_parameters()}

    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole HF tensors this pipeline stage owns, each once; see ``WeightMap.iter_hf_tensors``.

        Every rank of ``trainer.weight_sources`` must iterate to the end, and each gets the tensors.
        """
        if not self._policy.has_weights:
            raise TrainerError("trainer.weights", "are read while their memory is given away", "call reload first")
        return self._weights.iter_hf_tensors()

    def export_hf(self, path: str | Path, source_dir: str | Path) -> None:
        """Write the policy as an HF directory; it appears at ``path`` whole or not at all.

        Args:
            path: the new directory, on a file system every rank sees; one that is there is replaced.
            source_dir: HF directory whose config.json and tokenizer are copied.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        tensors = self.iter_hf_tensors() if self._is_gathering else iter(())
        run_export_hf(tensors, Path(path), Path(source_dir), self.is_weight_source)

    @contextmanager
    def _frozen_weights(self, which: str) -> Iterator[None]:
        """Show other weights to the model; the policy's stay where they are."""
        policy = {name: p.data for name, p in self._policy.named_parameters()}
        try:
            for name, parameter in self._policy.named_parameters():
                parameter.data = self._frozen[which][name].to(parameter.device)
            yield
        finally:
            for name, parameter in self._policy.named_parameters():
                parameter.data = policy[name]

    # ---- memory

    def offload_state(self) -> None:
        """Take all but the policy's weights off the device: gradients, optimizers, the critic. What is frozen is in the
        host always. Weights can be sent and exported; nothing can be computed or saved until :meth:`reload`.
        """
        self._policy.offload_state()
        if self._critic is not None:
            self._critic.offload_state()
            self._critic.offload_weights()
        self._run_empty_cache()

    def offload_weights(self) -> None:
        """Take the policy's weights off the device too; comes after :meth:`offload_state`."""
        self._policy.offload_weights()
        self._run_empty_cache()

    def reload(self) -> None:
        """Bring everything back, bit for bit; gradients as zeros."""
        for model in (self._policy, self._critic):
            if model is not None:
                model.reload()

    def _run_empty_cache(self) -> None:
        """Give what torch's allocator keeps back to the driver, so that another process can have it."""
        if self._trainer.device == "cuda":
            gc.collect()  # activations that a cycle of references still holds
            gc.freeze()  # what is left stays for long: half a second to look through, every time
            # Workspaces of 32 MiB, one for each thread that multiplies. They are taken out of blocks that happen to be
            # free, which may be logits' of gigabytes, and such a block goes back to the driver whole or not at all.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _require_whole(self) -> None:
        if not all(model.is_whole for model in (self._policy, self._critic) if model is not None):
            raise TrainerError("trainer", "computes while its memory is given away", "call reload first: report this")

    # ---- compute

    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, which: Literal["policy", "reference", "teacher"]
    ) -> list[np.ndarray]:
        """Log-probability of every trained target token at ``trainer.temperature``.

        Args:
            micro_batches: of this data-parallel rank; as many on every rank.
            which: the weights as they are, as :meth:`load_hf` left them, or the teacher's.

        Returns:
            [T] float32 nats per micro-batch, aligned to ``target_ids``, 0 where ``loss_mask`` is False, on rank 0 of TP
            and CP of the last stage; [] elsewhere.

        Raises:
            TrainerError: weights are asked for that were not kept.
        """
        return self._read(self._reader, micro_batches, which)

    def compute_teacher_topk(self, micro_batches: Sequence[MicroBatch], *, num_tokens: int) -> list[np.ndarray]:
        """The teacher's likeliest tokens before every trained target token, and their log-probabilities.

        Args:
            micro_batches: of this data-parallel rank; as many on every rank.
            num_tokens: K.

        Returns:
            [T, 2 K] float32 per micro-batch: K token ids, likeliest first, then their nats at ``trainer.temperature``;
            0 where ``loss_mask`` is False. On rank 0 of TP and CP of the last stage; [] elsewhere.

        Raises:
            TrainerError: no teacher was kept.
        """
        reader = TopkReader(num_tokens, self._trainer.temperature, self._model.shapes.vocab_size, self._reader.group)
        return self._read(reader, micro_batches, "teacher")

    def _read(self, reader: Reader, micro_batches: Sequence[MicroBatch], which: str) -> list[np.ndarray]:
        self._require_whole()
        if which != "policy" and which not in self._frozen:
            fix = "set needs_reference or teacher_path, and load weights first"
            raise TrainerError("trainer.compute_logprobs", f"no {which} is kept", fix)
        with nullcontext() if which == "policy" else self._frozen_weights(which):
            return self._to_arrays(self._policy.run_forward(build_reading_step(reader), micro_batches))

    def _to_arrays(self, found: list[Tensor]) -> list[np.ndarray]:
        """What was read, where it is answered: rank 0 of TP and CP of the last stage."""
        ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        if not self._is_last_stage or any(ranks):
            return []
        return [tensor.cpu().numpy() for tensor in found]

    def train_step(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, without_gradient: Sequence[MicroBatch] = ()
    ) -> dict[str, float]:
        """One optimizer update.

        The loss is exactly the sum over all ranks and micro-batches of ``loss_weights`` x the objective's loss over
        trained tokens; what stands in other slots does not matter.

        Args:
            micro_batches: of this data-parallel rank, at least one; as many on every rank.
            objective: loss and metrics per token.
            without_gradient: more micro-batches, whose loss has no gradient: they go forward only, for the metrics.

        Returns:
            On every rank the same: ``loss``, ``grad_norm`` (before clipping), ``lr``, ``num_tokens`` (trained, of all
            ranks), and the objective's metrics averaged over trained tokens (those named ``_max``: the largest; those
            named ``_loss``: summed like the loss). On GPUs ``gpu_allocated_bytes_max`` too: what torch had allocated
            at once, on the fullest rank.

        Raises:
            TrainerError: loss or gradient is not finite; on every rank, and no weight was changed.
        """
        self._require_whole()
        self._seed(self._policy.num_train_steps)
        step = build_train_step(self._reader, objective)
        if self._trainer.device == "cpu":
            return self._policy.run_train_step(step, micro_batches, without_gradient)
        torch.cuda.reset_peak_memory_stats()
        metrics = self._policy.run_train_step(step, micro_batches, without_gradient)
        peak = torch.tensor(torch.cuda.max_memory_allocated(), device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return {**metrics, "gpu_allocated_bytes_max": float(peak)}

    # ---- critic

    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """The critic's value of the state before every trained target token.

        Args:
            micro_batches: of this data-parallel rank; as many on every rank.

        Returns:
            [T] float32 in units of the reward per micro-batch, aligned to ``target_ids``: entry t has seen the tokens
            up to t and not ``target_ids[t]``; 0 where ``loss_mask`` is False. On rank 0 of TP and CP of the last
            stage; [] elsewhere.

        Raises:
            TrainerError: there is no critic.
        """
        return self._to_arrays(self._find_critic().run_forward(build_reading_step(ValueReader()), micro_batches))

    def critic_step(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> dict[str, float]:
        """One optimizer update of the critic; the policy stays as it is.

        The loss is the sum over all ranks and micro-batches of ``loss_weights`` x the objective's loss over trained
        tokens.

        Args:
            micro_batches: of this data-parallel rank, at least one; as many on every rank.
            objective: (batch, values [T]) -> loss [T] and metrics [T] each.

        Returns:
            As :meth:`train_step`, of the critic.

        Raises:
            TrainerError: there is no critic; or loss or gradient is not finite: on every rank, no weight was changed.
        """
        critic = self._find_critic()
        self._seed(critic.num_train_steps)
        return critic.run_train_step(build_train_step(ValueReader(), objective), micro_batches)

    def _find_critic(self) -> TrainedModel:
        self._require_whole()
        if self._critic is None:
            raise TrainerError("trainer.critic", "there is no critic", "set algo.critic")
        return self._critic

    # ---- checkpoint

    def save_checkpoint(self, directory: str | Path) -> None:
        """Write models, optimizers, schedules and reference; resumable at another layout.

        Args:
            directory: empty, on a file system every rank sees. Only a directory whose save returned is complete, so
                give a fresh one and rename it afterwards.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        self._require_whole()
        run_save_checkpoint(self._policy, self._critic, self._frozen.get("reference", {}), Path(directory))

    def load_checkpoint(self, directory: str | Path) -> None:
        """Continue from :meth:`save_checkpoint`, at any layout; nothing need be loaded before.

        Learning rate and Adam's numbers stay those of this trainer.

        Raises:
            CheckpointError: it is missing, broken, of another model, or only one of checkpoint and recipe has a critic;
                on every rank.
        """
        self._require_whole()
        if self._trainer.needs_reference and "reference" not in self._frozen:
            self._keep("reference")
        run_load_checkpoint(self._policy, self._critic, self._frozen.get("reference", {}), Path(directory))

    def close(self) -> None:
        """Leave the process group; the rank is of no use afterwards."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
