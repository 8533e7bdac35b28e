"""Tests of programs; a package so that they can share `helpers`."""
