"""Saved values that move out of the memory of a device."""
