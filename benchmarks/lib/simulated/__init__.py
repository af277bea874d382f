"""Simulated training jobs on a fabric's truth, played against a policy: no process, no sleeping, seeded."""
