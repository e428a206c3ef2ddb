"""Loops of a flat graph: frames, counters, and those written by hand."""
