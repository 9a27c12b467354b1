"""The sidecar: one torch-free process per user, node and job that owns the arenas and persists snapshots."""
