"""Models: parameters, layers and activations, from numbers, a configuration file or a module."""
