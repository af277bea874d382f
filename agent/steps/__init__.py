"""Where training steps begin and end, and what is kept of each."""
