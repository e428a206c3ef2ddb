"""Branches and loops as primitives, cut by device, and the tables that the scheduler walks."""
