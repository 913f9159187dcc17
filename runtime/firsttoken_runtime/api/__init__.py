"""The API process: HTTP in, tokens out. No torch in here.

app.py, admin.py   the two ASGI applications; service.py is the state behind both
schemas.py, errors.py   what comes in, and what is answered when it is wrong
generation.py, bodies.py, respond.py   tokens → text → response, with the TTFT account
engine_client.py   the line to the engine process
"""
