"""Equality of mathematical answers.

Start at `equal`. Plain numbers are compared exactly (`quantity`). Other answers are rewritten as LaTeX (`formula`)
for math-verify, which parses and compares them in worker processes with limits (`worker`).
"""
