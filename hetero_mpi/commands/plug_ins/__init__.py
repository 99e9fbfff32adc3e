"""Plug-in commands. Each module in this folder adds a command with the module's name to those in ``options``.

A module defines

    ABOUT             summary for the list of commands, with any details after a ``;``
    add_options(add)  declares the options by calling ``add``, argparse's ``add_argument``
    run(**options)    runs the command and returns lines or a string to print, or an exit code

Every ``--help`` imports all plug-ins, so import slow packages inside ``run``.
"""
