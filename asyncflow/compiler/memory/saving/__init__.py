"""The choice of the values that a loop saves."""
