"""Plug-in commands: each module of this folder is a command with the module's name, in addition to those of ``options``.

A module defines

    ABOUT             summary in the list of commands; details after a ``;``
    add_options(add)  declares options with ``add``, the ``add_argument`` of argparse
    run(**options)    runs the command; returns lines or a text to print, or an exit code

Every ``--help`` imports all plug-ins, so import slow packages inside ``run``.
"""
