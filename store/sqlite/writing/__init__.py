"""The writer: queueing, committing, and limiting what the store keeps."""
