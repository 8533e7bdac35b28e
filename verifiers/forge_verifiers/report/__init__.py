"""What an ensemble did, for people: tables, charts, one HTML file.

In: a fitted ensemble and its evidence. Out: text and HTML. Waits for: nothing.
"""
