"""Runs of `sl.fit`: the files of a run's folder, what they say, and what would make it faster.

records        the files of a run folder, and how they are written
run            what is known of a run, as plain values
breakdown      where each rank's time goes
files          files of a folder that may hold anything, read within bounds
read           from a folder to a run
"""
