"""Parts of neural networks."""
