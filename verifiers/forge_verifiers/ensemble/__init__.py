"""Weak verifiers combined into one reward. Start at `ensemble`."""
