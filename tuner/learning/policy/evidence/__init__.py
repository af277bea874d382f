"""What was measured of each setting under each key, and what follows for those that were not tried."""
