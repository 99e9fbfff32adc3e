"""The command ``doctor``: what the hosts have and lack, and what to do about it."""
