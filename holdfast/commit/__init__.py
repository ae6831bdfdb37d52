"""Operations that all workers commit exactly once, and the decision on which state a new generation goes on with."""
