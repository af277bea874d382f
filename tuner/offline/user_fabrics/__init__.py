"""Fabrics that a user makes of a machine's topology file."""
