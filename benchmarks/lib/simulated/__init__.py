"""Training jobs on a fabric's truth, played against what decides: no process, no sleeping, seeded."""
