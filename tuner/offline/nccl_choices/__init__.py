"""NCCL's behaviour on a cluster, by its own library: its choices, effects of plans, releases compared."""
