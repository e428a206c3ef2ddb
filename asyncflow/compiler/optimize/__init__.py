"""Passes that make a structured graph smaller without changing a bit of its results."""
