"""Verbs: one file each, which reads arguments, calls the room that does the work, and shows the answer.

`main` holds the table of verbs and the frame around them; `output` is how every verb speaks.
"""
