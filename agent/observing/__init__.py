"""This rank's observations: the plugin's rings in blocks, device memory, trace files."""
