"""Pure torch functions of the algorithms: no configuration, no collectives, no I/O.

Shapes in docstrings: R rollouts, S samples, G groups, T tokens of a packed micro-batch, L_i tokens of sample i.
Logprobs, KL and entropy are in nats. A mask selects, it never multiplies: what stands in a masked slot, NaN included,
reaches neither a value nor a gradient. ``docs/algorithms.md`` maps every function to its equation, key and tests.
"""
