"""Functions of elements: arithmetic, mathematics, comparisons, bits."""
