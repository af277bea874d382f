"""Shows running jobs in a browser or a terminal: read-only, in a process of its own."""
