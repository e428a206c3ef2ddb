"""Values before a run: dtypes, shapes, nests, operators."""
