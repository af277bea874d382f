"""Many nodes and what they share, without the nodes."""
