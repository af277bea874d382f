"""The daemon, what it learns, and the offline tools."""
