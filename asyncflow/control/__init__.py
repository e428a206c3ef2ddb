"""How are branches and loops written? `cond`, `while_loop`, TensorArray, folds, and the primitives they lower to."""
