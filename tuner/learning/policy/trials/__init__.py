"""Which setting is tried where and when, and what that may cost."""
