"""Reinforcement-learning post-training of language models as declarative recipes."""

__version__ = "0.1.0"
