"""Explains decisions to people; decides nothing."""
