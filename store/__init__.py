"""Records at rest and in flight: the contracts every other part shares, and the SQLite store."""
