"""Planning: profiles, costs, plans, schedules and simulation, using only the standard library, numpy and tomli."""
