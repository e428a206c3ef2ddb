"""How is a graph differentiated, loops and branches included?"""
