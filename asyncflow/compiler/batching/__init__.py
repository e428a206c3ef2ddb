"""Passes that join the matrix products of many iterations into one (Cavs' eager and lazy ops, in any loop)."""
