"""What the plugin and the emulation cost per collective."""
