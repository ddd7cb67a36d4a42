"""Commands for an installation's owner: backup, restore, doctor, changes of the pepper."""
