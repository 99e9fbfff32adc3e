"""HTTP for people and programs on rank 0: connections, their limits, and who may ask. What is answered is said elsewhere."""
