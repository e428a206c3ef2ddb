"""Lifting: a body over one row becomes a body over many."""
