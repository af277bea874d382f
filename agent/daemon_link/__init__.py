"""The agent's line to the daemon, and who the job and its leading daemon are."""
