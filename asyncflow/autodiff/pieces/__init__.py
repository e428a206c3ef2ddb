"""Pieces of a graph with a gradient of their own, or that a gradient runs again."""
