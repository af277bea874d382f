"""Damaged files: what is found, what is saved, and the new file in their place."""
