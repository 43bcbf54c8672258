"""What was measured, how, and the dated results.

Every benchmark prints a report in one form: machine, versions, command, table. Speeds
are ratios of things run in turn, or stand next to the matrix rate of the same run.
"""
