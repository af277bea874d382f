"""What a cluster is: GPUs, nodes, and what its network moves per second."""
