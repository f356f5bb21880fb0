"""Verifiers: what a rollout is worth."""
