"""Which values loops save for their gradients, and what that takes."""
