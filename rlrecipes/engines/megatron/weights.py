"""HF weights and Megatron weights, both ways, by one table. Owns names, order and slices; refuses numerics.

A row of :data:`TABLE` pairs a Megatron parameter with the HF tensors it is made of and says how. ``{layer}`` stands for
the layer, counted over the whole model, and ``{expert}`` for the expert. Families differ only in which rows their
models have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlrecipes.config.schema import ModelShapes
from rlrecipes.engines.megatron.hf_directory import INDEX_FILE
from rlrecipes.errors import DataError

SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Row:
    """How one Megatron parameter stands in an HF model.

    Attributes:
        hf: names of its tensors there.
        megatron: its names here; Transformer Engine's layers fuse norms, so some have two.
        kind: ``replicated``: the same on every TP rank. ``rows`` and ``columns``: split over TP in dimension 0 or 1.
            ``vocabulary``: rows, padded. ``gate_up``: this rank's gate rows, then its up rows. ``qkv``: for each of
            this rank's query groups its query heads, its key head, its value head.
    """

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    kind: str


def _layer(hf: tuple[str, ...], megatron: tuple[str, ...], kind: str) -> Row:
    prefixed = tuple(f"model.layers.{{layer}}.{name}" for name in hf)
    return Row(prefixed, tuple(f"decoder.layers.{{}}.{name}" for name in megatron), kind)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
EMBEDDING = Row(("model.embed_tokens.weight",), ("embedding.word_embeddings.weight",), "vocabulary")
TABLE = (
    EMBEDDING,
    _layer(
        ("input_layernorm.weight",),
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        "replicated",
    ),
    _layer(tuple(f"{name}.weight" for name in _QKV), ("self_attention.linear_qkv.weight",), "qkv"),
    _layer(tuple(f"{name}.bias" for name in _QKV), ("self_attention.linear_qkv.bias",), "qkv"),
    _layer(("self_attn.q_norm.weight",), ("self_attention.q_layernorm.weight",), "replicated"),
    _layer(("self_attn.k_norm.weight",), ("self_attention.k_layernorm.weight",), "replicated"),
    _layer(("self_attn.o_proj.weight",), ("self_attention.linear_proj.weight",), "columns"),
    _layer(
        ("post_attention_layernorm.weight",),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        "replicated",
    ),
    _layer(("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("mlp.linear_fc1.weight",), "gate_up"),
    _layer(("mlp.down_proj.weight",), ("mlp.linear_fc2.weight",), "columns"),
    _layer(("mlp.gate.weight",), ("mlp.router.weight",), "replicated"),
    _layer(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        ("mlp.experts.local_experts.{}.linear_fc1.weight",),
        "gate_up",
    ),
    _layer(("mlp.experts.{expert}.down_proj.weight",), ("mlp.experts.local_experts.{}.linear_fc2.weight",), "columns"),
    Row(("model.norm.weight",), ("decoder.final_layernorm.weight",), "replicated"),
    Row(("lm_head.weight",), ("output_layer.weight",), "vocabulary"),
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_ROWS_BY_NAME = {name: row for row in TABLE for name in row.megatron}

Read = Callable[[str, int, slice, int], Tensor]
"""(HF name, dimension, where, whole size of that dimension) -> that slice."""


class HfReader:
    """Slices of the safetensors of an HF directory, read on demand; a context manager.

    Args:
        path: the directory.

    Raises:
        DataError: it holds no safetensors, or they cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    @cached_property
    def files(self) -> Mapping[str, str]:
        """File of each tensor, by HF name."""
        try:
            if (self._path / INDEX_FILE).is_file():
                index: dict[str, str] = json.loads((self._path / INDEX_FILE).read_text())["weight_map"]
                return index
            with safe_open(self._path / SINGLE_FILE, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise self._error(f"holds no readable safetensors: {error}") from error

    def __enter__(self) -> HfReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, name: str, dim: int, where: slice, size: int) -> Tensor:
        """Read a slice of one tensor in one dimension.

        Raises:
            DataError: the tensor is missing, or that dimension is not ``size``.
        """
        if name not in self.files:
            raise self._error(f"has no tensor {name}")
        file = self.files[name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._path / file, framework="pt"))
            view = self._open[file].get_slice(name)
            if view.get_shape()[dim] != size:
                raise self._error(f"{name} has shape {view.get_shape()}; dimension {dim} should be {size}")
            tensor: Tensor = view[where] if dim == 0 else view[:, where]
        except (OSError, SafetensorError) as error:
            raise self._error(f"{file} cannot be read: {error}") from error
        return tensor

    def _error(self, problem: str) -> DataError:
        return DataError(f"model.path={self._path}", problem, "give an HF directory of this family and these shapes")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A parameter of this rank that an HF model has.

    Attributes:
        row: how it stands there.
        layer: counted over the whole model; None outside layers.
        expert: counted over this rank; None outside experts.
        parameter: its part of this rank.
    """

    row: Row
    layer: int | None
    expert: int | None
    parameter: torch.nn.Parameter


def _gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """A tensor's value on every rank of a group."""
    if group.size() == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Parts one after the other; one that is alone stays where it lies."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class WeightMap:
    """The table, applied to this rank's part of a model.

    Args:
        chunks: this stage's GPTModels, unwrapped, one a model chunk.
        shapes: of the whole model.
        group: TP ranks of this stage.
        elsewhere: parameters that no HF model has; their values come from elsewhere.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        shapes: ModelShapes,
        group: dist.ProcessGroup,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        self._chunks, self._shapes, self._group, self._elsewhere = chunks, shapes, group, elsewhere

    @cached_property
    def _entries(self) -> list[_Entry]:
        return [entry for chunk in self._chunks for entry in self._list_entries(chunk)]

    def _list_entries(self, chunk: GPTModel) -> Iterator[_Entry]:
        for name, parameter in chunk.named_parameters():
            if name in self._elsewhere:
                continue
            layer, expert = _LAYER.match(name), _EXPERT.search(name)
            generic = _EXPERT.sub(".local_experts.{}.", _LAYER.sub("decoder.layers.{}.", name))
            row = _ROWS_BY_NAME[generic]
            if row.megatron[0] == "output_layer.weight" and not self._shapes.untie_embeddings_and_output_weights:
                row = EMBEDDING  # a last stage's copy of the tied embedding
            yield _Entry(
                row,
                chunk.decoder.layers[int(layer[1])].layer_number - 1 if layer else None,
                int(expert[1]) if expert else None,
                parameter,
            )

    def _name(self, entry: _Entry, ep_rank: int) -> list[str]:
        """HF names of a parameter; of an expert, as that EP rank counts it."""
        expert = None
        if entry.expert is not None and self._shapes.num_moe_experts is not None:
            num_local = self._shapes.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
            expert = ep_rank * num_local + entry.expert
        return [hf.format(layer=entry.layer, expert=expert) for hf in entry.row.hf]

    def _group_of(self, entry: _Entry) -> dist.ProcessGroup:
        """The ranks over which one tensor is split."""
        return self._group if entry.expert is None else parallel_state.get_expert_tensor_parallel_group()

    @torch.no_grad()
    def run_load(self, read: Read) -> None:
        """Fill every parameter of this rank, reading only its slices.

        Args:
            read: slices of HF tensors.

        Raises:
            DataError: a tensor is missing or has another shape.
        """
        for entry in self._entries:
            names, parameter = self._name(entry, parallel_state.get_expert_model_parallel_rank()), entry.parameter
            value = self._to_megatron(entry.row.kind, names, parameter, self._group_of(entry), read)
            if value.shape[1:] != parameter.shape[1:]:
                raise DataError(
                    f"model.path: {names[0]}",
                    f"has rows of {tuple(value.shape[1:])} instead of {tuple(parameter.shape[1:])}",
                    "give an HF directory of this family and these shapes",
                )
            parameter[: len(value)].copy_(value)
            parameter[len(value) :].zero_()  # padding of the vocabulary

    @torch.no_grad()
    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole HF tensors this pipeline stage owns, each once, gathered over TP, experts over EP and ETP.

        Every rank of these groups must iterate to the end, and each gets every tensor. A tied embedding comes from the
        first stage alone. What one rank holds whole and in HF's order is not copied: it changes with the next step.

        Yields:
            (HF name, tensor in the model's dtype on its device).
        """
        for entry in self._entries:
            if entry.row is EMBEDDING and not self._chunks[0].pre_process:
                continue
            local = entry.parameter.detach()
            if entry.expert is not None:
                yield from self._gather_experts(entry, local)
                continue
            parts = _gather(local, self._group) if entry.row.kind != "replicated" else [local]
            yield from zip(self._name(entry, 0), self._to_hf(entry.row.kind, parts), strict=True)

    def _gather_experts(self, entry: _Entry, local: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The experts that stand in one place of each EP rank."""
        parts = _gather(local, parallel_state.get_expert_tensor_and_model_parallel_group())
        etp = self._group_of(entry).size()
        for ep_rank in range(len(parts) // etp):
            own = parts[ep_rank * etp : (ep_rank + 1) * etp]
            yield from zip(self._name(entry, ep_rank), self._to_hf(entry.row.kind, own), strict=True)

    def _to_megatron(
        self, kind: str, names: list[str], parameter: Tensor, group: dist.ProcessGroup, read: Read
    ) -> Tensor:
        """This rank's value of a parameter; without the rows that only pad the vocabulary."""
        rank, size = group.rank(), group.size()

        def share(local_size: int) -> tuple[slice, int]:
            """Where this rank's equal share lies, and the size of the whole."""
            return slice(rank * local_size, (rank + 1) * local_size), size * local_size

        if kind == "replicated":
            return read(names[0], 0, slice(None), len(parameter))
        if kind == "columns":
            return read(names[0], 1, *share(parameter.shape[1]))
        if kind == "vocabulary":
            rows = self._shapes.vocab_size
            start, end = (min(at * len(parameter), rows) for at in (rank, rank + 1))
            return read(names[0], 0, slice(start, end), rows)
        if kind == "gate_up":
            return torch.cat([read(name, 0, *share(len(parameter) // 2)) for name in names])
        groups = self._shapes.num_query_groups // size
        parts = []
        for name, rows in zip(names, self._rows_per_group(), strict=True):
            part = read(name, 0, *share(groups * rows))
            parts.append(part.view(groups, rows, *part.shape[1:]))
        return torch.cat(parts, 1).flatten(0, 1)

    def _to_hf(self, kind: str, parts: list[Tensor]) -> list[Tensor]:
        """HF tensors of a parameter, from its value on every TP rank."""
        if kind == "replicated":
            return parts
        if kind == "columns":
            return [_join(parts, 1)]
        if kind == "vocabulary":
            return [_join(parts)[: self._shapes.vocab_size]]
        if kind == "gate_up":
            return [_join(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
        whole = _join(parts)
        grouped = whole.view(self._shapes.num_query_groups, -1, *whole.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(grouped, self._rows_per_group(), 1)]

    def _rows_per_group(self) -> list[int]:
        """Rows of query, key and value of one query group."""
        heads = self._shapes.num_attention_heads // self._shapes.num_query_groups
        return [heads * self._shapes.kv_channels, self._shapes.kv_channels, self._shapes.kv_channels]
