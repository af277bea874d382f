"""The agent's connection to the daemon, the job's id, and the address of its leading daemon."""
