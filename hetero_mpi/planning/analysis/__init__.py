"""Questions about a profile or plan that is there: idle time, what-if, drift, replanning, doubtful times."""
