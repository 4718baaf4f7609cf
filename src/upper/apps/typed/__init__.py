"""Typed tables: columns out of JSON values, kept beside `latest` by every sync.

definitions   what the tables are: key patterns, columns, types; how a definition may change
convert       from keys and values to columns, and why a value does not fit
versions      the versions of each key, for tables with history (SCD2)
outputs       the Delta tables, as outputs that follow the lake
infer         a proposal, made from the data
"""
