"""The generated function of a region."""
