"""A graph as text, and back."""
