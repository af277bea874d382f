"""Detects and times training steps, and keeps the latest."""
