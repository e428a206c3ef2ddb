"""Programs: `Graph`, `Node`, `Tensor`, `Op`, dtypes and shapes, scopes, text."""
