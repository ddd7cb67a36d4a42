"""Back an installation up into a folder, and restore it.

folder     the files of a backup, and their check
database   pg_dump and pg_restore
backing_up, restoring   the two commands
"""
