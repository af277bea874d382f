"""Jobs of a store: which is meant, what each gained, how it ended."""
