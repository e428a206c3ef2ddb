"""Branches and loops over rows."""
