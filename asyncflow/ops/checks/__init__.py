"""Looking at values while a graph runs."""
