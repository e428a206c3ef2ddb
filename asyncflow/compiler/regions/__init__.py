"""Nodes that become one generated function, and what cards do by themselves."""
