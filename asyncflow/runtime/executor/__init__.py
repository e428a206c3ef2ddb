"""Executors: each runs one partition of a plan once."""
