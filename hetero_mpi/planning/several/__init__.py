"""Several pipelines side by side: a few by trying divisions of the ranks (``few``), many by columns of like ranks (``layouts``),
and any plan made better as a whole (``polish``).
"""
