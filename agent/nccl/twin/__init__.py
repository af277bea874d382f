"""A twin of a cluster: the official libnccl decides for a described machine, without a GPU."""
