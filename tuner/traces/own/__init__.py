"""Formats of our own: `launch --log-trace` and `export --to measurements`."""
