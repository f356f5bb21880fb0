"""The steps of bare_grpo.py: its trainer, what it asks the server, and the order of both."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson
import torch
from against_others import (
    GROUP_SIZE,
    LR,
    MAX_TOKENS,
    NUM_NEW_TOKENS,
    NUM_PROMPTS,
    read_prompts,
    score,
)
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from watched_run import Recorder

if TYPE_CHECKING:
    from bare_grpo import Server

CLIP = 0.2
WAYS = ("a request a rollout", "a request a prompt, n = 16", "one request")


@dataclass(frozen=True)
class Sample:
    """One rollout, ready to train.

    Attributes:
        token_ids: of prompt and answer.
        logprobs: the engine's, of the answer.
        advantage: of every token of the answer.
    """

    token_ids: list[int]
    logprobs: list[float]
    advantage: float


# ---- the trainer


def to_megatron_config(hf: dict[str, Any], **fields: Any) -> TransformerConfig:
    """A Llama of an HF config.json, in bfloat16."""
    num_heads = hf["num_attention_heads"]
    taken = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": num_heads,
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // num_heads,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": True,
    }
    return TransformerConfig(**taken | fields)


def compute_logprobs(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, context: Any, **_: Any) -> Tensor:
    """Log probabilities of the trained tokens, [N]; Megatron's hook after the last layer."""
    positions, targets = context
    logits, _ = output_layer(hidden_states.index_select(0, positions), weight=output_weight)
    group = parallel_state.get_tensor_model_parallel_group()
    return -te_parallel_cross_entropy(logits, targets[:, None], group).squeeze(1)


def iter_micro_batches(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Samples in order, packed up to MAX_TOKENS; tensors on the CPU."""
    part: list[Sample] = []
    for sample in [*samples, None]:
        if part and (sample is None or sum(len(s.token_ids) for s in [*part, sample]) > MAX_TOKENS):
            yield pack(part)
            part = []
        if sample is not None:
            part.append(sample)


def pack(samples: Sequence[Sample]) -> dict[str, Any]:
    """One micro-batch: what the model reads, and what the loss reads of its trained tokens."""
    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    # What a position says is about the next token.
    positions = np.concatenate(
        [np.arange(end - len(sample.logprobs), end) - 1 for sample, end in zip(samples, starts[1:], strict=True)]
    )
    return {
        "token_ids": torch.as_tensor(token_ids)[None],
        "position_ids": torch.as_tensor(np.concatenate([np.arange(length) for length in lengths]))[None],
        "cu_seqlens": torch.as_tensor(starts, dtype=torch.int32),
        "positions": torch.as_tensor(positions),
        "targets": torch.as_tensor(token_ids[positions + 1]),
        "old_logprobs": torch.as_tensor(np.concatenate([s.logprobs for s in samples]), dtype=torch.float32),
        "advantages": torch.as_tensor(
            np.repeat([s.advantage for s in samples], [len(s.logprobs) for s in samples]), dtype=torch.float32
        ),
        "longest": max(lengths),
    }


class Trainer:
    """A GPTModel under Megatron's DDP and distributed optimizer, on one GPU.

    Args:
        model_dir: an HF directory of a Llama with tied embeddings.
        spec: of its layers.
        device: where it lies.
        fields: of TransformerConfig, that differ.
    """

    def __init__(self, model_dir: Path, spec: Any, device: str, **fields: Any) -> None:
        hf = json.loads((model_dir / "config.json").read_text())
        config = to_megatron_config(hf, **fields)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=hf["vocab_size"],
            max_sequence_length=hf["max_position_embeddings"],
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            rotary_base=hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"],
            parallel_output=True,
        ).to(device=device, dtype=config.params_dtype)
        self._device, self._model, self._groups = device, model, config.num_query_groups
        self._rows = [config.num_attention_heads // self._groups * config.kv_channels, *(config.kv_channels,) * 2]
        self._load(load_file(model_dir / "model.safetensors"))
        self._ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.98,
            clip_grad=1.0,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )
        self._optimizer = get_megatron_optimizer(optimizer, [self._ddp])
        self._host: dict[tuple[int, int], Tensor] = {}
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []

    # weights

    def _iter_layer(self, number: int) -> Iterator[tuple[str, list[str]]]:
        """Megatron's parameters of a layer, and the HF tensors each is made of."""
        prefix = f"model.layers.{number}."
        own = dict(self._model.decoder.layers[number].named_parameters())
        for name in own:
            if name.endswith("linear_qkv.weight"):
                hf = [f"self_attn.{part}_proj" for part in "qkv"]
            elif name.endswith("linear_proj.weight"):
                hf = ["self_attn.o_proj"]
            elif name.endswith("linear_fc1.weight"):
                hf = ["mlp.gate_proj", "mlp.up_proj"]
            elif name.endswith("linear_fc2.weight"):
                hf = ["mlp.down_proj"]
            else:
                is_first = "linear_qkv" in name or name.startswith("input_layernorm")
                hf = ["input_layernorm" if is_first else "post_attention_layernorm"]
            yield name, [f"{prefix}{part}.weight" for part in hf]

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        self._model.embedding.word_embeddings.weight.copy_(weights["model.embed_tokens.weight"])
        self._model.decoder.final_layernorm.weight.copy_(weights["model.norm.weight"])
        for number, layer in enumerate(self._model.decoder.layers):
            for name, hf in self._iter_layer(number):
                parts = [weights[part] for part in hf]
                if len(parts) == 3:
                    grouped = (p.view(self._groups, rows, -1) for p, rows in zip(parts, self._rows, strict=True))
                    parts = [torch.cat([*grouped], 1).flatten(0, 1)]
                layer.get_parameter(name).copy_(torch.cat(parts))

    @torch.no_grad()
    def iter_hf(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the HF model, as the weights are now."""
        yield "model.embed_tokens.weight", self._model.embedding.word_embeddings.weight.detach()
        yield "model.norm.weight", self._model.decoder.final_layernorm.weight.detach()
        for number, layer in enumerate(self._model.decoder.layers):
            for name, hf in self._iter_layer(number):
                whole = layer.get_parameter(name).detach()
                parts: Iterable[Tensor] = [whole] if len(hf) == 1 else whole.chunk(2)
                if len(hf) == 3:
                    grouped = whole.view(self._groups, sum(self._rows), -1).split(self._rows, 1)
                    parts = (part.flatten(0, 1) for part in grouped)
                yield from zip(hf, parts, strict=True)

    # memory

    def _find_storages(self, which: str) -> list[torch.UntypedStorage]:
        if which == "weights":
            tensors: Iterable[Tensor] = self._model.parameters()
        elif which == "gradients":
            tensors = (buffer.grad_data for buffer in self._ddp.buffers)
        else:
            inner = [part.optimizer for part in self._optimizer.chained_optimizers]
            tensors = [tensor for part in inner for group in part.param_groups for tensor in group["params"]]
            tensors += [value for part in inner for state in part.state.values() for value in state.values()]
        storages = (tensor.untyped_storage() for tensor in tensors if torch.is_tensor(tensor) and tensor.is_cuda)
        return [*{storage._cdata: storage for storage in storages if storage.nbytes()}.values()]

    def offload(self, *parts: str) -> None:
        """Move ``weights`` or ``optimizer`` to page-locked memory of the host, or drop ``gradients``."""
        for which in parts:
            for storage in self._find_storages(which):
                size = storage.nbytes()
                self._offloaded.append((storage, size))
                if which != "gradients":
                    host = self._host.get((storage._cdata, size))
                    if host is None:
                        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                        self._host[storage._cdata, size] = host
                    host.copy_(view_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in self._offloaded:
            storage.resize_(0)
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def reload(self) -> None:
        """Bring everything back; gradients undefined, which the next step fills with zeros."""
        for storage, size in self._offloaded:
            storage.resize_(size)
            if (host := self._host.get((storage._cdata, size))) is not None:
                view_bytes(storage).copy_(host, non_blocking=True)
        self._offloaded.clear()
        torch.cuda.synchronize()

    # learning

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step; what it says of the samples."""
        num_tokens = sum(len(sample.logprobs) for sample in samples)
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        total = torch.zeros(2, device=self._device)
        for batch in iter_micro_batches(samples):
            total += self._run_micro_batch(batch, num_tokens)
        finalize_model_grads([self._ddp])
        _, grad_norm, _ = self._optimizer.step()
        self._optimizer.zero_grad()  # copies in float32 that the step made
        loss, difference = total.tolist()
        return {"loss": loss, "grad_norm": float(grad_norm), "difference": difference, "num_tokens": num_tokens}

    def _run_micro_batch(self, batch: dict[str, Any], num_tokens: int) -> Tensor:
        at = {name: self._move(value) for name, value in batch.items() if torch.is_tensor(value)}
        starts, longest = at["cu_seqlens"], batch["longest"]
        logprobs = self._ddp(
            at["token_ids"],
            at["position_ids"],
            None,
            packed_seq_params=PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest),
            output_processor=compute_logprobs,
            output_processor_context=(at["positions"], at["targets"]),
        )
        ratio = (logprobs - at["old_logprobs"]).exp()
        gains = ratio * at["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * at["advantages"]
        loss = -torch.minimum(*gains).sum() / num_tokens  # answers are of one length: the mean of their means
        loss.backward()
        with torch.no_grad():
            return torch.stack([loss.detach(), (logprobs - at["old_logprobs"]).abs().sum() / num_tokens])

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor if self._device == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


def view_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ---- the engine


async def post(session: aiohttp.ClientSession, url: str, body: Any = None) -> Any:
    """One exchange; anything but success is an error."""
    data = orjson.dumps({} if body is None else body)
    async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
        content = await response.read()
        if response.status != 200:
            raise SystemExit(f"{url} answers {response.status}: {content[:500]!r}")
    return orjson.loads(content) if content[:1] in (b"[", b"{") else None


async def flush(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the server is idle, which it is a moment after its last answer, and forget its prefixes."""
    for _ in range(200):
        async with session.post(f"{url}/flush_cache") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.01)
    raise SystemExit("the server is never idle")


async def generate(session: aiohttp.ClientSession, url: str, prompts: list[list[int]], way: str) -> list[list[Any]]:
    """GROUP_SIZE answers to each prompt."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    many = sampling | {"n": GROUP_SIZE}
    url = f"{url}/generate"

    def ask(input_ids: Any, sampling: dict[str, Any]) -> Any:
        return post(session, url, {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True})

    repeated = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    if way == WAYS[0]:
        found = await asyncio.gather(*(ask(prompt, sampling) for prompt in repeated))
    elif way == WAYS[1]:
        return list(await asyncio.gather(*(ask(prompt, many) for prompt in prompts)))
    else:
        found = await ask(repeated, sampling)
    return [found[start : start + GROUP_SIZE] for start in range(0, len(found), GROUP_SIZE)]


async def push(session: aiohttp.ClientSession, url: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Weights as one handle of GPU memory."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(weights))
    content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    torch.cuda.synchronize()
    payload = MultiprocessingSerializer.serialize(content, output_str=True)
    body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "flush_cache": False}
    answer = await post(session, f"{url}/update_weights_from_tensor", body)
    if not answer.get("success", True):
        raise SystemExit(f"the server took no weights: {answer}")


# ---- a step


def to_samples(prompts: list[list[int]], groups: list[list[Any]]) -> tuple[list[Sample], list[float]]:
    """Rewards, advantages within each group, and what is trained."""
    samples, rewards = [], []
    for prompt, group in zip(prompts, groups, strict=True):
        found = np.array([score(answer["text"]) for answer in group])
        rewards += found.tolist()
        advantages = (found - found.mean()) / (found.std() + 1e-6)
        for answer, advantage in zip(group, advantages, strict=True):
            tokens = answer["meta_info"]["output_token_logprobs"]
            samples.append(Sample([*prompt, *(t[1] for t in tokens)], [t[0] for t in tokens], float(advantage)))
    return samples, rewards


class Stopwatch:
    """Seconds between its calls, by name; the GPU is waited for."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._at = time.perf_counter()

    def note(self, name: str) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.spent[name] = self.spent.get(name, 0.0) + now - self._at
        self._at = now


async def run_step(
    session: aiohttp.ClientSession, url: str, trainer: Trainer, prompts: list[list[int]], way: str
) -> dict[str, Any]:
    """One step, from the engine's turn to the engine's turn."""
    started_s, watch = time.perf_counter(), Stopwatch()
    groups = await generate(session, url, prompts, way)
    watch.note("rollout")
    samples, rewards = to_samples(prompts, groups)
    watch.note("reward")
    await flush(session, url)
    await post(session, f"{url}/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
    trainer.reload()
    watch.note("memory")
    found = trainer.train(samples)
    watch.note("train")
    trainer.offload("gradients", "optimizer")
    await post(session, f"{url}/resume_memory_occupation", {"tags": ["weights"]})
    watch.note("memory")
    await push(session, url, trainer.iter_hf())
    watch.note("weights")
    trainer.offload("weights")
    await post(session, f"{url}/resume_memory_occupation", {"tags": ["kv_cache"]})
    watch.note("memory")
    total_s = time.perf_counter() - started_s
    return {
        "phases": watch.spent,
        "total_s": total_s,
        "num_samples": len(samples),
        "mean_tokens": found["num_tokens"] / len(samples),
        "reward": float(np.mean(rewards)),
        **{name: found[name] for name in ("loss", "grad_norm", "difference")},
    }


async def check_push(session: aiohttp.ClientSession, url: str, trainer: Trainer, prompt: list[int]) -> None:
    """An answer changes with noisy weights, and comes back with the trainer's: names and shapes are right."""

    async def answer() -> str:
        await flush(session, url)
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
        return str((await post(session, f"{url}/generate", body))["text"])

    before = await answer()
    noisy = ((n, w if "norm" in n else w + 0.05 * torch.randn_like(w)) for n, w in trainer.iter_hf())
    await push(session, url, noisy)
    other = await answer()
    await push(session, url, trainer.iter_hf())
    after = await answer()
    print(f"answers: {before!r}, with noise {other!r}, after {after!r}", flush=True)
    if before != after or other == before:
        raise SystemExit("weights do not arrive")


async def time_ways(session: aiohttp.ClientSession, url: str, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds of each; the first is tried twice, since nothing is warm at first."""
    times: dict[str, float] = {}
    for way in (WAYS[0], *WAYS):
        await flush(session, url)
        start = time.perf_counter()
        await generate(session, url, prompts, way)
        times[way] = round(time.perf_counter() - start, 3)
    print(times, flush=True)
    return times


def start_megatron() -> None:
    """One rank, on GPU 0."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)


async def run(arguments: argparse.Namespace, server: Server) -> None:
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()  # handles name GPUs by UUID, as the server expects
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in read_prompts(arguments.prompts)]
    recorder = Recorder(arguments.output)
    # No limit on connections, and no end of the session before that of this process, which whoever started it bounds.
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await server.wait(session, arguments.until - time.time())
        start_megatron()
        trainer = Trainer(arguments.model, get_gpt_layer_with_transformer_engine_spec(), "cuda")
        await check_push(session, server.url, trainer, prompts[0])
        times = await time_ways(session, server.url, prompts[:NUM_PROMPTS])
        way = min(times, key=lambda way: times[way])
        trainer.offload("gradients", "optimizer", "weights")
        await flush(session, server.url)
        longest = 0.0
        for first in range(0, len(prompts) - NUM_PROMPTS + 1, NUM_PROMPTS):
            if time.time() + longest > arguments.until:
                break
            step = await run_step(session, server.url, trainer, prompts[first : first + NUM_PROMPTS], way)
            recorder.tell(**step, name=f"{way}; s of each way {times}")
            print(step, flush=True)
            longest = step["total_s"] if first else 0.0
    torch.distributed.destroy_process_group()
