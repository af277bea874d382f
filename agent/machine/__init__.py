"""Where this process runs: its place in the job, and the hardware under whose name is learned."""
