"""Tests of rollouts; a package so that they can share `fakes`."""
