"""Full-text indexes of a lake, with tantivy: one index for each group of partitions.

definitions   the stored definitions, and where an index is
documents     the schema, and documents from live keys
output        the index as an output of the lake: workers, positions, rebuilding
search        searching, also after certain writes
manage        creating, listing, rebuilding and dropping
"""
