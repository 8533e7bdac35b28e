"""Are two mathematical answers equal?

In: two texts. Out: yes or no. Waits for math-verify's process, with a deadline, where our own reader cannot read.
Start at `equal`, which compares what `parser` makes of texts, whose values `expression` computes.
"""
