"""The engine: who computes what in the next step, on which KV pages, and which token follows.

`engine.Engine` is the loop step; `scheduler` decides (pure), `tables` keeps pages and prefix tree in step
with the sequences, `sampling` picks tokens, `snapshot` turns a switch message into what a step obeys,
`integrity` recounts every page. `process` is the shell around it that talks to the API process.
"""
