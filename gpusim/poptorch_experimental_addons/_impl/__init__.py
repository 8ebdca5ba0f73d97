"""The definitions, in the modules of the original: programs import from there too."""
