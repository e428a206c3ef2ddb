"""Layers of images and of other values with channels."""
