"""Records at rest: one SQLite file, one writer."""
