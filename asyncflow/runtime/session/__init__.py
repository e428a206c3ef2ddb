"""The objects that users hold: `Session`, prepared calls, and traced functions."""
