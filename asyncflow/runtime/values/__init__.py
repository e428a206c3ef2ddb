"""Values that go into runs and come out of them: feeds, fetches, and arrays of other libraries."""
