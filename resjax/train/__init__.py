"""How is a model trained? State, step and loop, and what they write."""
