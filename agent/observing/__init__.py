"""What this rank saw: the plugin's rings in blocks, device memory, trace files."""
