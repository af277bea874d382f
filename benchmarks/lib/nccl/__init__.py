"""NCCL's own library: its releases, its choices, and others' plugins in it."""
