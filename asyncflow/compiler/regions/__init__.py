"""Regions: nodes that become one generated function, and work that cards do by themselves."""
