"""Finds ranks that collectives wait for, apart from slow links and chance. Pure; it decides nothing."""
