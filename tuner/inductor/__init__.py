"""What torch inductor is told of collectives' durations."""
