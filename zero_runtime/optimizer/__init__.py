"""torch's optimizers on shards."""
