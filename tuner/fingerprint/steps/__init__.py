"""Finds the step in a sequence of collectives, and what its volumes prove."""
