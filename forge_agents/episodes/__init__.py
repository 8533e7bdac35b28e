"""Plays single episodes, creates demonstrations, and reads the episodes that runs and benchmarks store."""
