"""Signal propagation at the start of training: what is measured, what theory expects, and how both are shown."""
