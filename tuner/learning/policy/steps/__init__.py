"""What step times say about settings."""
