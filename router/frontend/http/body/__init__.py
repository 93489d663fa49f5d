"""Reading of bodies: compression, fields, and media."""
