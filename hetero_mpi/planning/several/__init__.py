"""Several pipelines side by side, cut alike by columns of ranks (``layouts``)."""
