"""What a configuration takes: memory by part, and a step by part."""
