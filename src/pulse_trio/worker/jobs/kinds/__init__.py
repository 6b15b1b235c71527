"""How a handler is called: one way for each `runs`, chosen once for each kind, at the worker's start.

A call takes the worker's `RunningJob` and the JSON of its arguments, and returns or raises what the handler did. Cancelling the
call cancels the handler as far as its kind can be cancelled, and the call ends only when the handler has.
"""
