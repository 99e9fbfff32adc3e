"""Data pipeline: text files or conversation records -> token ids -> sequences -> batches.

Runs on rank 0 only; needs numpy and tokenizers, no torch.
"""
