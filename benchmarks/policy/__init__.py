"""The gains, losses and risks of the policy."""
