"""Which plan it is, with its figures and reasons: the searches are asked, and what comes out is explained."""
