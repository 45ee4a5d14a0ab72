"""Models: a stack of residual sites between an input and an output head."""
