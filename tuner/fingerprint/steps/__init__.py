"""Finds the step in a sequence of collectives, and its parts."""
