"""What someone else may do: to a run's files, to the keeper's socket, with text on a terminal."""
