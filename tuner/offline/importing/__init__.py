"""`zerotune import`."""
