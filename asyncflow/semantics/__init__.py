"""Possible outcomes of a program with state: the operational semantics of MAPL '17 as executable code, and its uses."""
