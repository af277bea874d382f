"""Sweeps, imports and replay."""
