"""Every parser against hostile bytes: ``targets`` is the table, ``python -m tests.fuzz TARGET`` runs one."""
