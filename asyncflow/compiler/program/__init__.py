"""The program to compile: the part of a graph that one kind of run needs, and facts about its nodes."""
