"""Commands that are a module each, beside those of ``options``: a module of this folder is the command of its name.

A module holds

    ABOUT             its line among all commands, and more behind a ``;``
    add_options(add)  declares its options by ``add``, which is argparse's ``add_argument``
    run(**options)    does it; returns lines or a text to print, or an exit code

Every ``--help`` imports all of them: what takes long to import is imported inside ``run``.
"""
