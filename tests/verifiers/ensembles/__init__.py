"""Tests of ensembles. A package, so that they can share `simulated`."""
