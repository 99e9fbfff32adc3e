"""Everything that happens before the first step: devices, data, the model's structure, the profile and the plan."""
