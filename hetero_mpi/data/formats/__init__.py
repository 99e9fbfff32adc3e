"""Formats of record files, one module each, selected by a file's first bytes or name.

A module defines

    BEGINS    tuple of magic bytes; () if the format has none
    SUFFIXES  file name suffixes, used if no module recognises the magic bytes
    read_records(path, keys, read_keys): yields (position, JSON value) for every record, as ``record_files.values_of`` does

All other files are read as JSON. Packages beyond the project's dependencies are imported inside ``read_records``.
"""
