"""Checkpoints: written beside runs, published as a whole, checked before they are restored."""
