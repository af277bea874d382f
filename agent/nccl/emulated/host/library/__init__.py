"""NCCL's own library as the host: it decides and launches on the mock CUDA, and tells its profiler."""
