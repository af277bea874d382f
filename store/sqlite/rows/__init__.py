"""What rows hold, and what follows from them: measurements, jobs, decisions, their checksums."""
