"""Verifiers on models that score a text in one forward pass. Start at `text_models`."""
