"""The device that is not there: its clock, its computation, its memory."""
