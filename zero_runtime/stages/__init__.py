"""The three stages at work: gathers, gradients, reductions, and their order."""
