"""Where every parameter lies in flat buffers, and which rank owns which part."""
