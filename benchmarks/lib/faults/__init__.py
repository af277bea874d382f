"""Lines and clocks that misbehave on purpose, for chosen processes alone."""
