"""What an ensemble did, for people: a table, charts, one HTML file. Start at `report`; `pictures` draws its charts.

In: what a fitted combiner believes, and the score rows behind it. Out: text and HTML. Waits for nothing.
"""
