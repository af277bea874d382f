"""The cost of the plugin and of the emulation per collective."""
