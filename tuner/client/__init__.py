"""Speaking to a daemon from outside a job."""
