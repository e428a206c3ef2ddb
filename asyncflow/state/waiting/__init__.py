"""Waiting for a state: the order of waiting firings, and notice to event loops."""
