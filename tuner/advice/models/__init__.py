"""What a model is: parameters, layers and activations, from numbers, a configuration file or a module."""
