"""Tests of the combiners, which share `regimes`."""
