"""Equality of mathematical answers.

Start at `equal`, which compares plain numbers (`quantity`) itself. It rewrites other answers in LaTeX (`formula`).
math-verify reads and compares them in processes with limits (`worker`).
"""
