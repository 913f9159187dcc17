"""Measuring a running server from outside.

client.py     one streamed request and what it took
scenarios.py  the loads that are run
statistics.py quantiles and medians
machine.py    what it was measured on
bench.py      `firsttoken bench`: runs scenarios and prints the table
"""
