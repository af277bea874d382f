"""Formats of NCCL, its tests and its plugins."""
