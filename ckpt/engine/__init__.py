"""The verbs: save, load, verify, restore, prune. Commits last; a collective runs only in the caller's own thread."""
