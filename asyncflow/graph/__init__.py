"""What is a program? `Graph`, `Node`, `Tensor`, `Op`, dtypes and shapes, scopes, text."""
