"""A training run loses a worker and nothing else: ``make demo``, or ``python -m trainer.demo``."""
