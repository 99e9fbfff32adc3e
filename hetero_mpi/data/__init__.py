"""Data: text files -> documents -> tokens -> sequences -> batches.

Runs on rank 0 only; numpy and tokenizers, no torch.
"""
