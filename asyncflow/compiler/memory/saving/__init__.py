"""Which values a loop saves."""
