"""Are two mathematical answers equal?

In: two texts. Out: yes or no. Waits for: the reference checker's process, with a deadline.
"""
