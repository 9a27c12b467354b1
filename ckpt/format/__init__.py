"""``ckpt/1``: bytes to frozen records and back. No I/O, no clock, no torch. See SPEC.md."""
