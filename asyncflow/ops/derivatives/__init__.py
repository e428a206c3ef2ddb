"""Derivatives of operations: one module a family, as in `asyncflow.ops`; importing it installs the rules."""
