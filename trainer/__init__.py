"""A small GPT trainer that survives failures: ``torchrun --nproc-per-node 2 -m trainer -- --run RUN …``."""
