"""Rows of other tools' formats: their names, and their conversion without loss into rows of ours.

The row reader, the console's upload and the command line share it: `cli/lorikeet_cli` has a link to
this folder. So it imports nothing but the standard library, itself and `..strict_json`.
"""
