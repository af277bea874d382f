"""Unmodified GPU scripts on the mock CUDA: torch's CUDA build, ProcessGroupNCCL and NCCL's library without a GPU."""
