"""One pipeline: which ranks in which order, and where the chain is cut. Exact over orders where these are few, dynamic programming
along lines of ranks otherwise.
"""
