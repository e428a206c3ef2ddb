"""Making arrays, their dtypes and shapes, and other arrangements of their elements."""
