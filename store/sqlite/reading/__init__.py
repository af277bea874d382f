"""What is asked of a store."""
