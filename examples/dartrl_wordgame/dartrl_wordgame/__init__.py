"""A game of words: an environment, a task set, a dialect and a reward for dartrl, one file each."""
