"""Games and puzzles with well-known rules."""
