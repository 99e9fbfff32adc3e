"""What tests share: samples, small jobs, and how ranks, hosts and SLURM are started on one machine."""
