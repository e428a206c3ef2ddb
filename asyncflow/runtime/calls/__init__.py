"""Calls of a session: their options, their plans, and the values that they take."""
