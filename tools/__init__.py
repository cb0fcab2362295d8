"""Tools of developers, not part of the product: the reference pages, the docs as a site, stalls, the demo model."""
