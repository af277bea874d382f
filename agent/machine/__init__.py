"""Where this process runs: its place on the node, and the identity of the hardware."""
