"""Passes that make one matrix product of those of many iterations (Cavs' eager and lazy ops, in any loop)."""
