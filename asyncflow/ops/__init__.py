"""Operations: one module a family; an op's shape rule and kernels stand side by side."""
