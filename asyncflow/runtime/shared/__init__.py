"""Work that runs share: batches, pooled loops, vertex maps."""
