"""From a committed step back to its bytes, every one verified; needs no torch."""
