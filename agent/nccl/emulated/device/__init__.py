"""The emulated device: its clock, its computation, its memory."""
