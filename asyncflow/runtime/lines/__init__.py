"""Lines by priority."""
