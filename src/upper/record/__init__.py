"""One change as bytes: its layout, the functions that read and build it, and where it lies in a file.

`layout` has the offsets, opcodes, sizes and limits, `change` the accessors and builders, `location` the
number that replaces a record whose value is not in memory. No other module states an offset of a record;
the compiled kernel has constants of its own, and a test compares them with `layout`.
"""
