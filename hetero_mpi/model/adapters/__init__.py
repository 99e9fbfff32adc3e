"""LoRA adapters: targets, initialisation, files, and merging into weights."""
