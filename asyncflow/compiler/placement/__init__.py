"""Placement: the device and stream of each node, and costs there."""
