"""Metrics from the loop to files, MLflow, the terminal and pictures."""
