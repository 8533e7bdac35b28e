"""Tests of rollouts, which share `fakes`."""
