"""Adapters for other libraries: each module needs the library that it is named after.

A module only translates between that library and ours. Begin with `sqlalchemy.py`, or with the module of your library.
"""
