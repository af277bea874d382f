"""Jobs as they run, in a browser or a terminal: read-only, and from a process of its own."""
