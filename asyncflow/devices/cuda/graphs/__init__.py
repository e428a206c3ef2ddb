"""CUDA graphs, and loops that a card runs by itself."""
