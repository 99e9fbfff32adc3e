"""Model directories of Hugging Face: read, fetched, cached and written, a tensor at a time."""
