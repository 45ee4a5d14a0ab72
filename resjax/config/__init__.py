"""Configurations: their fields, files and flags, and what they mean. No module but ``scheme`` loads JAX."""

from resjax.config.tree import default, from_dict, to_dict

__all__ = ["default", "from_dict", "to_dict"]
