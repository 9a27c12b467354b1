"""Device to arena: one copy, laid out as the final files. The only room that touches CUDA streams and pinned memory."""
