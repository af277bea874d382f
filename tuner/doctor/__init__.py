"""`zerotune doctor`: what on this machine would keep jobs from being tuned, and what to do about it."""
