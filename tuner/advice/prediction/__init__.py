"""Predictions of a configuration: memory by part, and step time by part."""
