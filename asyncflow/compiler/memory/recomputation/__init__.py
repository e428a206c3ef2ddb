"""Iterations and parts of them that a gradient runs again."""
