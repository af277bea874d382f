"""Bucket and prefetch depth, changed while training runs, by all ranks alike."""
