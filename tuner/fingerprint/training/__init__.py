"""Trains the encoders and says how often they are right; offline, with torch."""
