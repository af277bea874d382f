"""The effects of the agent on a training process."""
