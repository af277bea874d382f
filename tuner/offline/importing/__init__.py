"""`zerotune store import`."""
