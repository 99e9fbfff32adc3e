"""Data pipeline: turns text files or conversation records into token ids, sequences and batches.

It runs on rank 0 only and needs numpy and tokenizers, but not torch.
"""
