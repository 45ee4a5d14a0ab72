"""How do many runs differ? A grid over fields of a configuration, its cells trained by as few programs as there are architectures."""
