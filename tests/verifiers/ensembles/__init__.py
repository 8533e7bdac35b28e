"""Tests of the combiners; a package so that they can share `regimes`."""
