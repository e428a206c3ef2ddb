"""CUDA graphs, and loops that a card runs by itself: off unless asked for, since no card has proved them."""
