"""Gives measured durations of collectives to torch inductor."""
