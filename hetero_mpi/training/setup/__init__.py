"""The work before the first step: devices, data, the model's shape, the profile and the plan."""
