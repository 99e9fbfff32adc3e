"""Data: text files -> documents, or record files -> conversations; -> tokens -> sequences -> batches.

Runs on rank 0 only; numpy and tokenizers, no torch.
"""
