"""Places of parameters in flat buffers, and the parts that ranks own."""
