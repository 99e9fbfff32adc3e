"""Several pipelines side by side, cut alike by columns of ranks (``layouts``), and plans fitted into memory (``fitting``)."""
