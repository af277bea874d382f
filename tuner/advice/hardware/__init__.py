"""Clusters: GPUs, nodes, and the speed of networks."""
