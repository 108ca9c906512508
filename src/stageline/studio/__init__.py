"""Stageline studio: schedules, plans and runs in the browser, served on this machine only.

serve      start the server on the loopback interface, with a random token in its address
app        the pages and the requests that they make
access     refuse what does not come from the studio's own pages
requests   JSON requests: read, validated, answered; errors as messages
static     the pages themselves: HTML, CSS and JavaScript, without a build step
"""
