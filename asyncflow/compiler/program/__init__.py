"""What is compiled: a copy of the part of a graph that one kind of run needs, and what is known of its nodes."""
