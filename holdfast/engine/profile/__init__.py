"""What each layer of a run costs, and how fast the links are: measured, not trained."""
