"""What the policy gains, loses and risks."""
