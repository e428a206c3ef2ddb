"""Normalisation of layers and channels."""
