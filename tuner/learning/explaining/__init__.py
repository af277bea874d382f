"""Decisions told to people; nothing is decided here."""
