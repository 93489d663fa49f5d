"""The cluster as Ray actors: `tandem up` and the orders it takes."""
