"""Which values loops save for their gradients, and which ones gradients compute again."""
