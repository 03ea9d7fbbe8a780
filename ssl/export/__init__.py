"""A trained backbone for other programs: one file per layout, each written, loaded back and compared."""
