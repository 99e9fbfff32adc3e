"""Other programs: files of other trainers and their calls, and what other programs read of ours."""
