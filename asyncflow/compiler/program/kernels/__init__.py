"""Kernels bound to devices; the ops that passes make, and how much work they are."""
