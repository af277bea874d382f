"""What NCCL does on the host: asks plugins, chooses, groups, launches, and tells the profiler."""
