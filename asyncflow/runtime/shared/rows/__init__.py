"""The rows of what is computed together."""
