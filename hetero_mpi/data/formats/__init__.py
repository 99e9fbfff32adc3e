"""Formats of record files, a module each: a file of ``[data] records`` is read by the module that its bytes or its name ask for.

A module holds

    BEGINS    tuple of bytes with which its files begin; () where nothing tells them
    SUFFIXES  ends of the names of its files, which count where no module knows the bytes
    read_records(path, keys, wanted) -> (place, JSON value) of every record, as ``record_files.values_of`` has them

Files that no module asks for are read as JSON. Packages beyond the project's own are imported inside ``read_records``.
"""
