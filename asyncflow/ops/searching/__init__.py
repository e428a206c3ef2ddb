"""Positions of elements, their order, and which are distinct."""
