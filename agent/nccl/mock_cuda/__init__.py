"""A mock CUDA: lends an unmodified libnccl a described machine with GPUs, on one without."""
