"""Trainer's tensors hashed as an engine hashes its own, and the comparison of the two.

SGLang keeps query, key and value (and gate and up) as one tensor each, and pads the vocabulary with rows of zeros.
Parts of a fused tensor must arrive in order, which the weight map guarantees. An engine lies on the kind of device that
the trainer lies on, so a tensor's own tells how it hashes. Engines with several ranks hash shards: they cannot be held
against this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from rlrecipes.errors import WeightSyncError
from rlrecipes.weight_sync.protocols import NamedTensors
from rlrecipes.weight_sync.tensor_hashes import TensorHasher, bring_to_host, build_hasher

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_OF_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64
_PART = re.compile(r"\.(" + "|".join(_FUSED) + r")\.")
_FIX = "the engine would sample from other weights than the trainer's: report it with the plan"


def to_engine_name(hf_name: str) -> str:
    """The engine's name of the tensor that holds ``hf_name``.

    Args:
        hf_name: e.g. ``model.layers.0.self_attn.q_proj.weight``.
    """
    return _PART.sub(lambda match: f".{_FUSED[match[1]]}.", hf_name)


class ChecksumTee:
    """Passes named tensors on and hashes them under way.

    Args:
        named_tensors: what a sync sends.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        self._named_tensors = named_tensors
        self._hashers: dict[str, TensorHasher] = {}

    def __iter__(self) -> NamedTensors:
        for name, tensor in self._named_tensors:
            flat, engine_name = tensor.detach().contiguous().reshape(-1).view(torch.uint8), to_engine_name(name)
            if engine_name not in self._hashers:
                self._hashers[engine_name] = build_hasher(tensor.device.type)
            self._hashers[engine_name].update(flat)
            if name.endswith(_OF_VOCABULARY):
                num_padded = -tensor.shape[0] % _VOCABULARY_MULTIPLE
                self._hashers[engine_name].update(flat.new_zeros(num_padded * len(flat) // len(tensor)))
            yield name, tensor

    def checksums(self) -> dict[str, str]:
        """Engine name -> 16 hex digits, of what has passed."""
        bring_to_host(self._hashers.values())
        return {name: hasher.hexdigest() for name, hasher in self._hashers.items()}


def compare_checksums(trainer: Mapping[str, str], engine: Mapping[str, str], url: str) -> None:
    """Hold an engine's tensors against the trainer's.

    An engine may hold a tied output layer under a name of its own; it is compared with the embedding.

    Args:
        trainer: from every pipeline stage, merged.
        engine: from the engine.
        url: of the engine.

    Raises:
        WeightSyncError: a tensor differs, or one side lacks it.
    """
    expected = dict(trainer)
    if "lm_head.weight" in engine and "lm_head.weight" not in expected:
        expected["lm_head.weight"] = expected.get("model.embed_tokens.weight", "")
    missing = sorted(expected.keys() - engine.keys())
    unknown = sorted(engine.keys() - expected.keys())
    different = sorted(name for name in expected.keys() & engine.keys() if expected[name] != engine[name])
    parts = {"differ": different, "missing in the engine": missing, "unknown to the trainer": unknown}
    found = [f"{len(names)} {what}: {', '.join(names[:3])}" for what, names in parts.items() if names]
    if found:
        raise WeightSyncError(url, "weights differ from the trainer's after a sync; " + "; ".join(found), _FIX)
