"""Adapters for other libraries: each module needs the library that it is named after.

A module only translates between that library and ours. Begin with the module of your library, such as `dogpile` or
`sqlalchemy.py`.
"""
