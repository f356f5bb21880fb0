"""A recipe and a cluster resolved into a frozen Plan, offline: no torch, ray, sglang or megatron here."""
