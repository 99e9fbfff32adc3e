"""LoRA adapters: target modules, initialisation, files, and merging into weights."""
