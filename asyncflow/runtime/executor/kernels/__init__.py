"""Calls of single kernels: their times, limits and failures."""
