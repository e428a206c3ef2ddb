"""What is known of a value before it is there: dtype, shape, nest, operators."""
