"""Measuring a running server from outside.

client, server, target     one streamed request; what a server serves and understands
plan, load, session        what is sent when; sending it; rounds of it (prompts, lengths and traces shape it)
scenarios                  loads with a name, each of which answers one question
summary, figures           from answers to figures (statistics: quantiles, intervals), resources beside them
bench, report, compare     `firsttoken bench`, its JSON and tables, and two reports side by side
overhead                   what the engine costs beside the model, in this process
"""
