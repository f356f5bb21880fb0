"""Executes a Plan: the only room that turns its nodes into objects and processes."""
