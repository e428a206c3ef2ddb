"""The program to compile: the part of a graph that one kind of run needs, and what is known of its nodes."""
