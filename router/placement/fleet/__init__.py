"""The workers of one model as its router knows them: reports, cached blocks, placements and traffic."""
