"""Decides a job's settings: one brain per job, with its policy, its guard and earlier jobs' measurements."""
