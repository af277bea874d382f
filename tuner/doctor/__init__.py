"""`zerotune doctor`: finds what would prevent tuning on this machine, with remedies."""
