"""Small instances: every plan of the finite set of plans that ``joint`` writes down, the best one proven."""
