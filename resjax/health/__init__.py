"""Residual health: probes inside the step; records, findings, tables and reports outside it."""
