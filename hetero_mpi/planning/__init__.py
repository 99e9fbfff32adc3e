"""Planning: profiles, costs, plans, schedules, simulation. Pure: standard library, numpy and tomli, nothing else."""
