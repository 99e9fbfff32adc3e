"""Values that planning reads and writes: frozen dataclasses of a cluster, a model, a request and a plan, and their TOML files."""
