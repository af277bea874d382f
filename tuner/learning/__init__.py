"""What decides: one brain per job, with its policy, its guard and what earlier jobs knew."""
