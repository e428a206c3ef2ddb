"""Stores that loops carry: of saved values, and of gradients that add up."""
