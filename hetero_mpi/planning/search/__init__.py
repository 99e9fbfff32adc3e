"""The search for plans in which every rank holds one stage."""
