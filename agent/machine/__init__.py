"""This process's rank on its node, and the identity of the hardware."""
