"""The site: its pages, links, pictures and formulas, and the questions that it has to answer."""
