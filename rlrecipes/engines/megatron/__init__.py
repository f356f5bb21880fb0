"""The trainer: Megatron-Core ranks, weights and checkpoints."""

import warnings

# Megatron tells at import, one line a module, that its optional GPU packages are not there.
warnings.filterwarnings("ignore", module="megatron")
