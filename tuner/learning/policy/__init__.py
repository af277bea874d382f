"""Chooses settings: evidence per (key, candidate), predictions for untried candidates, budget, trials."""
