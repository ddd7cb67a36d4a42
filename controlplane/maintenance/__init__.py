"""What an installation's owner runs: backup and restore, the doctor, changes of the pepper."""
