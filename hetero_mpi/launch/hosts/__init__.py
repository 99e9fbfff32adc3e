"""The machines of a job: host files, addresses, processes, and how a command reaches them."""
