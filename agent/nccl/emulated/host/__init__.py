"""NCCL's work on the host: it asks plugins, chooses, groups, launches, and reports to the profiler."""
