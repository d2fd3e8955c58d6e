"""What each command of the command line does, given its parsed options. Parsing is cli.py's."""
