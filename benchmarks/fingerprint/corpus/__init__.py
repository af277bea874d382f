"""Sequences of collectives to learn from: recorded, generated, and of other workloads."""
