"""What carries a planner's wishes out."""
