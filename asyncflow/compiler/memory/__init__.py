"""Values that loops save for their gradients, and values that gradients compute again."""
