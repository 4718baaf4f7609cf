"""Programs for the development of `upper`: what writes the reference pages. Not part of the package."""
