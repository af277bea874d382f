"""NCCL's own library: its releases, its choices, and foreign plugins in it."""
