"""Samples packed into a grid of micro-batches, one row a data-parallel rank."""
