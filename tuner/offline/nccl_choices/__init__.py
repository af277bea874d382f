"""What NCCL would do on a cluster, by its own library: choices, plans judged, releases compared."""
