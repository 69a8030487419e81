// Placeholder source for a layer without sources.
