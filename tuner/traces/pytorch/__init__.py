"""Formats of PyTorch and the tools around it."""
