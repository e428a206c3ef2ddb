"""What users hold: `Session`, prepared calls, and traced functions."""
