"""The Megatron-Core trainer rank: model, weights, train step and checkpoint."""
