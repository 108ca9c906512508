"""Reports of runs: a self-contained HTML page without scripts, and Markdown for a pull request.

elements       escaped text, tables and pages
style          colours and layout, light and dark
charts         curves of one run or several
bars           bars divided into parts, one for each rank
figures        the numbers of a run that reports show
sections       the parts of a page about one run
page           the page of one run
comparison     the page of several runs
markdown       a table and the findings, as Markdown
write          files that replace nothing but earlier reports
report         read runs, write their reports
"""
