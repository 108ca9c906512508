"""The kinds of comparisons: each makes cells, and measures one in the processes of a group."""
