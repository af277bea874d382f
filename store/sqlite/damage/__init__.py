"""Damaged files: finding damage, saving sound rows, and putting a new file in their place."""
