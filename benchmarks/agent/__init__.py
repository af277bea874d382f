"""What the agent adds to a training process."""
