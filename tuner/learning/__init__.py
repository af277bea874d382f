"""Decides what a job runs: one brain per job, with its policy, its guard and what earlier jobs measured."""
