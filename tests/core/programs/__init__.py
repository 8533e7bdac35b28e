"""Tests of programs, which share `helpers`."""
