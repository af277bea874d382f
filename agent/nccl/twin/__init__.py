"""A twin of a cluster: the official libnccl chooses settings for a described machine, without a GPU."""
