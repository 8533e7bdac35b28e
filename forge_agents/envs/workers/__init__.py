"""Environments in processes of their own: one that hangs or dies takes nobody with it.

In: the specification of an environment. Out: an environment whose calls go to a worker. Waits for: a free worker, and
each answer, with deadlines.
"""
