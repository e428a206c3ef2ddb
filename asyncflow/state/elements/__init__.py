"""Elements of queues: their order, copies and arrays."""
