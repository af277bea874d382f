"""One training step as a program on timelines."""
