"""The requests of the page of runs: folders of `sl.fit`, read while they are written."""
