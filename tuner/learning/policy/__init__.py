"""Choosing: evidence per (key, candidate), the posterior over what was not tried, budget, trials."""
