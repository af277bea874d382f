"""Rows of measurements, jobs and decisions, and their checksums."""
