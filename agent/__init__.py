"""The part of zerotune that lives inside the training process: light, never raises, never blocks."""
