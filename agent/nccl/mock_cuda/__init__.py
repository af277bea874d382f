"""A mock CUDA: shows an unmodified libnccl a described machine with GPUs, on a machine without GPUs."""
