"""Batches of graphs as data, and the order in which their vertices are computed."""
