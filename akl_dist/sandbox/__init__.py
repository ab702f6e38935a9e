"""The killable, kernel-isolated child in which generated Python runs, and its supervisor.

    judge or tool (client.py, session.py) ── control socket ──> supervisor.py ── fork ──> init (pid 1) ── exec ──> program
            └───────────── private pipes: stdin, stdout, requests, replies ─────────────────────────────────────┘

Used by verify (code) and by tool use. Linux and the standard library only; imports neither torch nor ray.
"""
