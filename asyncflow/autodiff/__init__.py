"""Derivatives of graphs, loops and branches included."""
