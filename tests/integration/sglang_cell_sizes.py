"""Run by SGLang's own interpreter: bytes of one token in its KV cache, by its own code.

python sglang_cell_sizes.py '[["DIR", TP, "bfloat16"], ...]'
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.model_executor import pool_configurator
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator


def compute_cell_size(path: str, tp: int, dtype: str) -> int:
    model = ModelConfig(model_path=path, trust_remote_code=False)
    is_latent = model.attention_arch == AttentionArch.MLA
    hybrid = pool_configurator.mambaish_config(model)
    num_layers = len(hybrid.full_attention_layer_ids) if hybrid else model.num_hidden_layers
    kvc = SimpleNamespace(
        model_config=model,
        kv_cache_dtype=getattr(torch, dtype),
        use_mla_backend=is_latent,
        server_args=SimpleNamespace(dsa_prefill_backend="fa3", dsa_decode_backend="fa3", enable_hisparse=False),
        ps=SimpleNamespace(pp_size=1, attn_cp_size=1),
        layer_info=SimpleNamespace(start_layer=0, end_layer=num_layers, num_effective_layers=num_layers),
    )
    with (
        mock.patch.object(pool_configurator, "get_parallel", lambda: SimpleNamespace(attn_tp_size=tp)),
        mock.patch("sglang.srt.layers.cp.utils.get_glm_dsa_layer_split_effective_num_layers", lambda kvc, n: n),
    ):
        return int(
            DefaultPoolConfigurator._compute_cell_size(SimpleNamespace(kv_cache_dtype_str=dtype), kvc, num_layers)
        )


if __name__ == "__main__":
    print(json.dumps([compute_cell_size(*case) for case in json.loads(sys.argv[1])]))
