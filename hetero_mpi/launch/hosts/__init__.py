"""The machines of a job: host files, addresses, the mesh between them, and running commands on them."""
