"""Predicts settings' durations before they are tried: features, NCCL's cost, its fitted correction, saved models."""
