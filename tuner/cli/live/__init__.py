"""Commands around running jobs."""
