"""Formats of record files, one module each, selected by a file's first bytes or name.

A module defines

    BEGINS    tuple of magic bytes; () if the format has none
    SUFFIXES  file name suffixes, used if no module recognises the bytes
    read_records(path, keys, read_keys) -> (position, JSON value) of every record, as ``record_files.values_of`` yields them

Other files are read as JSON. Packages beyond the project's dependencies are imported inside ``read_records``.
"""
