"""Operations that all workers commit exactly once, and what a new generation settles on."""
