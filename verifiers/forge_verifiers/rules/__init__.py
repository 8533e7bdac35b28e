"""Verifiers that need no model: checks of answers, patterns, schemas and sizes. `answers` finds the final answer."""
