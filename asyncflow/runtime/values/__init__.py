"""What goes into runs and comes out of them: feeds, fetches, and arrays of other libraries."""
