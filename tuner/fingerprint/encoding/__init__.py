"""Turns a step into scores: features, an encoder in numpy, and its weights."""
