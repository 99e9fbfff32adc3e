"""The machines of a job: host files, addresses, processes, and running commands on them."""
