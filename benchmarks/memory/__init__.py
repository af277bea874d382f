"""Device memory that runs short: what NCCL alone makes of it, and what the tuner does."""
