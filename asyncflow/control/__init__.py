"""Branches and loops: `cond`, `while_loop`, TensorArray, folds, and the primitives they lower to."""
