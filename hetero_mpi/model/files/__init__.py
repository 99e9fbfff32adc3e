"""Hugging Face model directories: reading, downloading, caching and writing, one tensor at a time."""
