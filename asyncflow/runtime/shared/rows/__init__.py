"""The rows of activations and vertices that are computed together."""
