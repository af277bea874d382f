"""Jobs of a store: finding a job, its gain, and its end."""
