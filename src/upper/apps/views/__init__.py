"""Views: named SQL over the relations of a lake, computed when they are queried.

definitions   the stored definitions, and which of them a query needs
manage        creating, listing and dropping
"""
