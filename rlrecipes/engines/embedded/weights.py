"""The weights of one model, fused for speed. Owns names, loading, in-place updates and checksums; refuses wrong shapes.

q, k and v are one matrix (``qkv_proj``) and so are gate and up (``gate_up_proj``), under the names SGLang gives them,
so checksums of the two servers can be compared tensor by tensor. Updates arrive under Hugging Face names.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlrecipes.engines.embedded.architecture import Architecture
from rlrecipes.errors import EngineError

logger = logging.getLogger(__name__)

VOCAB_MULTIPLE = 64
"""SGLang pads the vocabulary to it; the padding is zeros and is part of the checksum."""


@dataclass(frozen=True, slots=True)
class Region:
    """Where a Hugging Face tensor lives: rows ``start .. start + rows`` of tensor ``name``."""

    name: str
    start: int
    rows: int


class WeightShapeError(ValueError):
    """An update names a tensor of the model but brings another shape."""


class Weights:
    """All tensors of one model.

    Args:
        architecture: gives names and shapes.
        dtype: of every tensor.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        self.architecture = architecture
        self.regions = dict(_build_regions(architecture))
        shapes: dict[str, list[int]] = {}
        for region in self.regions.values():
            shapes.setdefault(region.name, [0])[0] += region.rows
        self.shapes = {name: (rows, *_columns(architecture, name)) for name, (rows,) in shapes.items()}
        self.tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in self.shapes.items()}

    def load_checkpoint(self, model_path: Path) -> None:
        """Fill every tensor from the directory's safetensors files.

        Raises:
            EngineError: files are missing or corrupt, or a tensor is missing or has another shape.
        """
        where = str(model_path)
        fix = "write the directory with transformers' save_pretrained"
        try:
            missing = set(self.regions) - self.update(_iterate_checkpoint(model_path))
        except (SafetensorError, OSError) as error:
            raise EngineError(where, f"its safetensors files cannot be read: {error}", fix) from error
        except WeightShapeError as error:
            raise EngineError(where, str(error), fix) from error
        if missing:
            raise EngineError(where, f"{len(missing)} tensors are missing, the first is {min(missing)}", fix)

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors in, by Hugging Face name or by fused name; unknown names are logged and skipped, as SGLang does.

        Returns:
            the Hugging Face names that were written.

        Raises:
            WeightShapeError: a shape differs; what came before stays written.
        """
        written = set()
        for name, tensor in named_tensors:
            target = self.find_target(name, tensor.shape)
            if target is not None:
                target.copy_(tensor)
                written.add(name)
        return written

    def find_target(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """Give the memory a tensor belongs to; None for unknown names.

        Raises:
            WeightShapeError: the shape differs.
        """
        region = self.regions.get(name)
        if region is not None:
            target = self.tensors[region.name][region.start : region.start + region.rows]
        elif name in self.tensors:
            target = self.tensors[name]
        else:
            self._report_unknown(name)
            return None
        if target.shape != shape:
            raise WeightShapeError(f"{name} has shape {list(shape)}, the model needs {list(target.shape)}")
        return target

    def _report_unknown(self, name: str) -> None:
        if not (name == "lm_head.weight" and self.architecture.is_tied) and "rotary_emb" not in name:
            logger.warning("parameter %s is not in the model; skipped", name)

    def compute_checksums(self) -> dict[str, str]:
        """Give every tensor's name the first 8 bytes of the SHA-256 of its bytes, in hexadecimal."""
        return {name: self._compute_checksum(name) for name in self.tensors}

    def _compute_checksum(self, name: str) -> str:
        tensor = self.tensors[name].contiguous()
        digest = hashlib.sha256(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            num_padding_rows = -tensor.shape[0] % VOCAB_MULTIPLE
            digest.update(bytes(num_padding_rows * tensor.shape[1] * tensor.element_size()))
        return digest.digest()[:8].hex()


def _columns(architecture: Architecture, name: str) -> tuple[int, ...]:
    if name.endswith("norm.weight") or name.endswith("layernorm.weight") or name.endswith(".bias"):
        return ()
    if name.endswith("o_proj.weight"):
        return (architecture.num_heads * architecture.head_dim,)
    if name.endswith("down_proj.weight"):
        return (architecture.intermediate_size,)
    return (architecture.hidden_size,)


def _build_regions(architecture: Architecture) -> Iterator[tuple[str, Region]]:
    """Yield every Hugging Face name with its region, in the order in which fused tensors are stacked."""
    a = architecture
    yield "model.embed_tokens.weight", Region("model.embed_tokens.weight", 0, a.vocab_size)
    for layer in range(a.num_layers):
        prefix = f"model.layers.{layer}"
        q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        qkv = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
        gate_up = (("gate_proj", a.intermediate_size), ("up_proj", a.intermediate_size))
        for kind in _kinds(a.has_qkv_bias):
            yield from _stack(f"{prefix}.self_attn", "qkv_proj", qkv, kind)
        for kind in _kinds(a.has_output_bias):
            yield from _stack(f"{prefix}.self_attn", "o_proj", (("o_proj", a.hidden_size),), kind)
        if a.has_qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield from _stack(f"{prefix}.self_attn", norm, ((norm, a.head_dim),), "weight")
        for kind in _kinds(a.has_mlp_bias):
            yield from _stack(f"{prefix}.mlp", "gate_up_proj", gate_up, kind)
            yield from _stack(f"{prefix}.mlp", "down_proj", (("down_proj", a.hidden_size),), kind)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield from _stack(prefix, norm, ((norm, a.hidden_size),), "weight")
    yield "model.norm.weight", Region("model.norm.weight", 0, a.hidden_size)
    if not a.is_tied:
        yield "lm_head.weight", Region("lm_head.weight", 0, a.vocab_size)


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _stack(prefix: str, fused: str, parts: tuple[tuple[str, int], ...], kind: str) -> Iterator[tuple[str, Region]]:
    start = 0
    for part, rows in parts:
        yield f"{prefix}.{part}.{kind}", Region(f"{prefix}.{fused}.{kind}", start, rows)
        start += rows


def _iterate_checkpoint(model_path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise OSError(f"no *.safetensors in {model_path}")
    for file in files:
        with safe_open(str(file), framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - not a mapping
                yield name, content.get_tensor(name)
