"""From a step to scores: features, encoders in numpy, and their weights."""
