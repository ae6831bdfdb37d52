"""Models, contestants and contests of the races with pipelines."""
