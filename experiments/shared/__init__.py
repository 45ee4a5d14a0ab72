"""What several experiments share: sizes of runs, arms, numbers of runs and of starts, pictures."""
